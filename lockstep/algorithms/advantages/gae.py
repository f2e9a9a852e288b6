"""Generalized advantage estimation with a critic."""

from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import register_adv_est
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.utils.masked import masked_whiten


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv:1506.02438): advantages whitened over the batch, returns for the critic.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  G_t = A_t + V_t

    t + 1 is the next token of the policy: positions with mask 0 (tool output, padding) are skipped, including their
    reward and value. V and A are 0 after the last token. Advantages are then whitened over the batch's tokens, which needs
    at least two; returns are not.
    """
    with torch.no_grad():
        mask = response_mask.bool()
        next_value = torch.zeros_like(values[:, 0])
        next_advantage = torch.zeros_like(next_value)
        columns = []
        for t in reversed(range(values.shape[1])):
            delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
            next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
            next_value = torch.where(mask[:, t], values[:, t], next_value)
            columns.append(next_advantage)
        advantages = torch.stack(columns[::-1], dim=1)
        returns = (advantages + values) * response_mask
        return masked_whiten(advantages, response_mask) * response_mask, returns
