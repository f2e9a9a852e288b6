"""GDPO: several rewards, each normalized within the group before they are summed."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from lockstep.algorithms.advantages.registry import register_adv_est
from lockstep.config.algorithm import AdvantageEstimator, AlgoConfig
from lockstep.registry import did_you_mean
from lockstep.utils.masked import masked_whiten


@register_adv_est(AdvantageEstimator.GDPO)
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
    non_tensor_batch: dict[str, np.ndarray] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv:2601.05242): A = whitened sum of w_k times the GRPO advantage of reward k.

    The rewards are columns of `non_tensor_batch`, one number per row, selected by `config.gdpo_reward_keys` and weighted by
    `config.gdpo_reward_weights` (all 1 if empty). Without keys, the score is the only reward. A reward that is equal for all
    samples of a group contributes 0. Whitening is over the batch's tokens.
    """
    with torch.no_grad():
        total = torch.zeros_like(token_level_rewards)
        for weight, rewards in _weighted_rewards(token_level_rewards, config, non_tensor_batch):
            advantages, _ = compute_grpo_outcome_advantage(
                rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo
            )
            total = total + weight * advantages
        advantages = masked_whiten(total, response_mask) * response_mask
        return advantages, advantages


def _weighted_rewards(
    token_level_rewards: Tensor, config: AlgoConfig | None, non_tensor_batch: dict[str, np.ndarray] | None
) -> list[tuple[float, Tensor]]:
    """Weight and (B, 1) values of each reward; the token rewards if the config names none."""
    keys = [] if config is None else config.gdpo_reward_keys
    if config is None or not keys:
        return [(1.0, token_level_rewards)]
    weights = config.gdpo_reward_weights or [1.0] * len(keys)
    if len(weights) != len(keys):
        raise ValueError(
            f"algorithm.gdpo_reward_weights={list(weights)}: needs one weight per key of "
            f"algorithm.gdpo_reward_keys ({len(keys)})"
        )
    columns = non_tensor_batch or {}
    return [(weight, _column(columns, key, token_level_rewards)) for weight, key in zip(weights, keys)]


def _column(columns: dict[str, np.ndarray], key: str, like: Tensor) -> Tensor:
    if key not in columns:
        raise ValueError(
            f"algorithm.gdpo_reward_keys contains {key!r}, which the reward function did not return. "
            f"{did_you_mean(key, columns)}"
        )
    try:
        values = torch.tensor([float(value) for value in columns[key]], dtype=like.dtype, device=like.device)
    except (TypeError, ValueError):
        raise ValueError(f"algorithm.gdpo_reward_keys: {key!r} must be one number per row") from None
    if not values.isfinite().all():
        raise ValueError(f"algorithm.gdpo_reward_keys: {key!r} contains a non-finite value")
    return values.unsqueeze(-1)
