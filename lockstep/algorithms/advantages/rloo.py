"""Leave-one-out: each sample relative to the mean of the other samples of its prompt."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import by_group, register_adv_est
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.utils.groupwise import as_torch_index, first_of_group, group_sum


@register_adv_est(AdvantageEstimator.RLOO)
@by_group
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """RLOO (arXiv:2402.14740): A = s - mean of the group's other scores. A group of one keeps its raw score."""
    return _leave_one_out(token_level_rewards, response_mask, index, singleton_factor=1.0)


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
@by_group
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """RLOO; a group of one gets 0."""
    return _leave_one_out(token_level_rewards, response_mask, index, singleton_factor=0.0)


def _leave_one_out(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, singleton_factor: float
) -> tuple[Tensor, Tensor]:
    """A = s - (sum of the group - s) / (n - 1), or `singleton_factor` times s if n = 1; returns equal the advantages."""
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        ids_B = as_torch_index(index, scores_B.device)
        count_B = group_sum(torch.ones_like(scores_B), ids_B)[ids_B]
        above_first_B = scores_B - first_of_group(scores_B, ids_B)[ids_B]  # equal scores give exactly 0
        others_B = (group_sum(above_first_B, ids_B)[ids_B] - above_first_B) / (count_B - 1).clamp(min=1)
        advantages_B = torch.where(count_B > 1, above_first_B - others_B, singleton_factor * scores_B)
        advantages = advantages_B.unsqueeze(-1) * response_mask
        return advantages, advantages
