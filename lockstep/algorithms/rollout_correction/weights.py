"""Truncated importance weights of tokens and sequences."""

import math
from typing import get_args

import torch
from torch import Tensor

from lockstep.algorithms.rollout_correction.summary import Metrics, clamped_std, extremes, fraction, sequence_statistics
from lockstep.config.algorithm import ImportanceLevel
from lockstep.utils.masked import masked_mean, masked_sum

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, which would overflow."""

_KEY = "algorithm.rollout_correction.rollout_is_threshold"


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, Metrics]:
    """Weights (B, R), 0 outside the mask and without gradient, and their statistics.

    token      w_t = min(r_t, threshold)                          truncated importance sampling
    sequence   the same with the product of a row's ratios, for all its tokens

    A threshold `low_high` sets weights outside these bounds to 0 instead (IcePop). With `rollout_is_batch_normalize`, the
    weights are divided by their mean over tokens or sequences.
    """
    if rollout_is not in get_args(ImportanceLevel):
        known = ", ".join(get_args(ImportanceLevel))
        raise ValueError(f"algorithm.rollout_correction.rollout_is={rollout_is}: must be one of {known}, or null")
    low, high = _bounds(rollout_is_threshold)
    log_weight = log_ratio.detach()
    if rollout_is == "sequence":
        log_weight = masked_sum(log_weight, response_mask, axis=-1).unsqueeze(-1).expand_as(log_ratio)
    raw = torch.where(response_mask.bool(), log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    weights = raw.clamp(max=high) if low is None else torch.where((raw >= low) & (raw <= high), raw, 0.0)
    metrics = _statistics(weights, raw, log_weight, response_mask, rollout_is, low, high)
    if rollout_is_batch_normalize:
        factor = _mean_weight(weights, response_mask, rollout_is)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def _bounds(threshold: str | float) -> tuple[float | None, float]:
    """(low, high) from `high` or `low_high`."""
    parts = str(threshold).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if isinstance(threshold, bool) or len(numbers) not in (1, 2) or min(numbers) <= 0 or numbers[0] > numbers[-1]:
        raise ValueError(f"{_KEY}={threshold}: must be a number above 0, or two as low_high")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def _mean_weight(weights: Tensor, response_mask: Tensor, rollout_is: str) -> Tensor:
    """Mean over tokens, or over sequences with tokens; 1 if it is 0."""
    if rollout_is == "token":
        mean = masked_mean(weights, response_mask)
    else:
        mean = masked_mean(masked_mean(weights, response_mask, axis=-1), response_mask.any(dim=-1))
    return torch.where(mean > 1e-8, mean, 1.0)


def _statistics(
    weights: Tensor,
    raw: Tensor,
    log_weight: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    low: float | None,
    high: float,
) -> Metrics:
    lower = 1.0 / high if low is None else low
    mean = masked_mean(weights, response_mask)
    metrics: Metrics = {"rollout_is_mean": mean}
    if rollout_is == "sequence":
        log_B = log_weight[:, 0]
        metrics["rollout_is_max"] = log_B.max().clamp(max=MAX_LOG_RATIO).exp()
        metrics["rollout_is_min"] = log_B.min().exp()
        metrics["rollout_is_ratio_fraction_high"] = fraction(log_B > math.log(high))
        metrics["rollout_is_ratio_fraction_low"] = fraction(log_B < math.log(lower))
    else:
        metrics["rollout_is_max"], metrics["rollout_is_min"] = extremes(weights, response_mask)
        metrics["rollout_is_ratio_fraction_high"] = masked_mean((raw > high).float(), response_mask)
        metrics["rollout_is_ratio_fraction_low"] = masked_mean((raw < lower).float(), response_mask)
    metrics["rollout_is_std"] = clamped_std(weights, response_mask, 0.0, high)
    metrics["rollout_is_eff_sample_size"] = 1.0 / masked_mean((weights / (mean + 1e-8)) ** 2, response_mask)
    mean_B = masked_mean(weights, response_mask, axis=-1)
    metrics |= sequence_statistics("rollout_is", mean_B, ideal=1.0)
    # before truncation: afterwards no weight exceeds the threshold
    raw_B = masked_mean(raw, response_mask, axis=-1)
    metrics["rollout_is_seq_fraction_high"] = fraction(raw_B > high)
    metrics["rollout_is_seq_fraction_low"] = fraction(raw_B < lower)
    if low is not None:
        metrics["rollout_is_oob_ratio"] = masked_mean(((raw < low) | (raw > high)).float(), response_mask)
    return metrics
