"""REINFORCE without a critic: REINFORCE++, its variant with a group baseline, and ReMax."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import by_group, register_adv_est
from lockstep.config.algorithm import AdvantageEstimator, AlgoConfig
from lockstep.utils.groupwise import as_torch_index, group_mean_std
from lockstep.utils.masked import masked_whiten


def returns_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the policy's tokens (B, R), 0 elsewhere.

    Positions with mask 0 are skipped: no discount, and their reward is ignored.
    """
    mask = response_mask.bool()
    running = torch.zeros_like(token_level_rewards[:, 0])
    columns = []
    for t in reversed(range(token_level_rewards.shape[1])):
        running = torch.where(mask[:, t], token_level_rewards[:, t] + gamma * running, running)
        columns.append(running)
    return torch.stack(columns[::-1], dim=1) * response_mask


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: AlgoConfig | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv:2501.03262): A = whitened returns to go, discounted by `config.gamma` (1 without a config).

    Whitening is over the batch's tokens and needs at least two.
    """
    with torch.no_grad():
        returns = returns_to_go(token_level_rewards, response_mask, 1.0 if config is None else config.gamma)
        return masked_whiten(returns, response_mask) * response_mask, returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a baseline: A = s - mean of the group, whitened over the batch's tokens.

    A group of one keeps its raw score before whitening. Returns equal the advantages.
    """
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        ids_B = as_torch_index(index, scores_B.device)
        mean_G, _, _ = group_mean_std(scores_B, ids_B)
        centred = (scores_B - mean_G[ids_B]).unsqueeze(-1) * response_mask
        advantages = masked_whiten(centred, response_mask) * response_mask
        return advantages, advantages


@register_adv_est(AdvantageEstimator.REMAX)
@by_group
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv:2310.10505): A = undiscounted return to go minus the score of the prompt's greedy response.

    `reward_baselines` (B,) holds those scores.
    """
    with torch.no_grad():
        returns = returns_to_go(token_level_rewards, response_mask, gamma=1.0)
        return returns - reward_baselines.unsqueeze(-1) * response_mask, returns
