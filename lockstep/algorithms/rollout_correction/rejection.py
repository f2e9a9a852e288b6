"""Rejection: remove tokens and sequences too far from the trainer's policy from the mask."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algorithms.rollout_correction.summary import Metrics, clamped_std, extremes, fraction, sequence_statistics
from lockstep.algorithms.rollout_correction.weights import MAX_LOG_RATIO
from lockstep.registry import did_you_mean
from lockstep.utils.masked import masked_mean, masked_sum

REJECTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)

_KEY = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Rejection:
    """One criterion: keep if low <= distance <= high.

    name: level and estimator, `seq_mean_k3`; level is token, seq_sum, seq_mean or seq_max.
    low, high: in units of the distance. k1 = -log r is signed and has both bounds, set by the user as ratios; k2 and k3 are
    never negative and have no lower bound (0).
    """

    name: str
    low: float
    high: float

    @property
    def level(self) -> str:
        return self.name.rpartition("_")[0]

    @property
    def has_low(self) -> bool:
        return self.name.endswith("k1")

    def keeps(self, distance: Tensor) -> Tensor:
        return (distance <= self.high) & (distance >= self.low) if self.has_low else distance <= self.high


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, Metrics]:
    """The mask (B, R) without the tokens that any criterion of `rollout_rs` rejects, and statistics per criterion.

    k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r per token; `seq_sum`, `seq_mean` and `seq_max` aggregate them over a
    sequence and keep or reject it as a whole. Criteria are separated by commas, with one threshold each or one for all.
    """
    criteria = _criteria(rollout_rs, rollout_rs_threshold)
    valid = response_mask.bool()
    # 1 if every criterion so far keeps the position, including padding
    kept = torch.ones_like(valid)
    metrics: Metrics = {}
    for rejection in criteria:
        distance = _distance(rejection, log_ratio.detach(), response_mask)
        passed = rejection.keeps(distance)
        kept = kept & passed
        metrics |= _statistics(rejection, distance, passed, valid)
    metrics["rollout_rs_masked_fraction"] = masked_mean((~kept).float(), valid)
    metrics["rollout_rs_seq_masked_fraction"] = fraction((~kept & valid).any(dim=-1))
    return response_mask * kept.to(response_mask.dtype), metrics


def _criteria(rollout_rs: str, threshold: str | float | None) -> list[Rejection]:
    names = list(dict.fromkeys(name.strip() for name in rollout_rs.split(",") if name.strip()))
    for name in names:
        if name not in REJECTIONS:
            raise ValueError(
                f"{_KEY}.rollout_rs={rollout_rs}: no such rejection criterion. {did_you_mean(name, REJECTIONS)}"
            )
    if not names:
        raise ValueError(f"{_KEY}.rollout_rs={rollout_rs!r}: is empty; set null to disable rejection")
    given = [] if threshold is None else [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(given) not in (1, len(names)):
        raise ValueError(
            f"{_KEY}.rollout_rs_threshold={threshold}: must be one threshold, or one per criterion of "
            f"{_KEY}.rollout_rs={rollout_rs}"
        )
    return [_criterion(name, spec) for name, spec in zip(names, given * len(names) if len(given) == 1 else given)]


def _criterion(name: str, spec: str) -> Rejection:
    try:
        numbers = [float(part) for part in spec.split("_")]
    except ValueError:
        numbers = []
    signed = name.endswith("k1")
    if not numbers or min(numbers) <= 0 or len(numbers) > (2 if signed else 1):
        allowed = "a ratio above 0, or two as low_high" if signed else "a number above 0"
        raise ValueError(f"{_KEY}.rollout_rs_threshold={spec}: must be {allowed} for {name}")
    if not signed:
        return Rejection(name, 0.0, numbers[0])
    low, high = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
    return Rejection(name, math.log(low), math.log(high))


def _distance(rejection: Rejection, log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """The criterion's distance at every position (B, R)."""
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if rejection.name.endswith("k1"):
        distance = -log_ratio
    elif rejection.name.endswith("k2"):
        distance = 0.5 * log_ratio**2
    else:
        distance = torch.exp(log_ratio) - 1.0 - log_ratio
    if rejection.level == "token":
        return distance
    if rejection.level == "seq_sum":
        distance_B = masked_sum(distance, response_mask, axis=-1)
    elif rejection.level == "seq_mean":
        distance_B = masked_mean(distance, response_mask, axis=-1)
    else:  # seq_max; k2 and k3 are never negative, so an empty row gets 0
        distance_B = torch.where(response_mask.bool(), distance, 0.0).amax(dim=-1)
    return distance_B.unsqueeze(-1).expand_as(distance)


def _statistics(rejection: Rejection, distance: Tensor, passed: Tensor, valid: Tensor) -> Metrics:
    prefix = f"rollout_rs_{rejection.name}"
    nonempty = valid.any(dim=-1)
    distance_B = (masked_mean(distance, valid, axis=-1) if rejection.level == "token" else distance[:, 0])[nonempty]
    metrics: Metrics = {f"{prefix}_mean": masked_mean(distance, valid)}
    if rejection.level == "token":
        metrics[f"{prefix}_max"], metrics[f"{prefix}_min"] = extremes(distance, valid)
        high = masked_mean((distance > rejection.high).float(), valid)
        low = masked_mean((distance < rejection.low).float(), valid)
    else:
        metrics[f"{prefix}_max"], metrics[f"{prefix}_min"] = distance_B.max(), distance_B.min()
        high, low = fraction(distance_B > rejection.high), fraction(distance_B < rejection.low)
    metrics[f"{prefix}_fraction_high"] = high
    metrics[f"{prefix}_fraction_low"] = low if rejection.has_low else torch.zeros_like(low)
    metrics[f"{prefix}_std"] = clamped_std(distance, valid, rejection.low, rejection.high)
    metrics |= sequence_statistics(prefix, distance_B, ideal=0.0)
    metrics[f"{prefix}_seq_fraction_high"] = fraction(distance_B > rejection.high)
    if rejection.has_low:
        metrics[f"{prefix}_seq_fraction_low"] = fraction(distance_B < rejection.low)
    metrics[f"{prefix}_masked_fraction"] = masked_mean((~passed).float(), valid)
    metrics[f"{prefix}_seq_masked_fraction"] = fraction((~passed & valid).any(dim=-1)[nonempty])
    return metrics
