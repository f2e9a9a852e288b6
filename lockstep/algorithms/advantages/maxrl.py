"""MaxRL: group-relative advantages that approximate the gradient of the log-likelihood of success."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import by_group, register_adv_est
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.utils.groupwise import as_torch_index, group_mean


@register_adv_est(AdvantageEstimator.MAXRL)
@by_group
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """MaxRL (arXiv:2602.02710): A = (s - mean of the group) / (mean of the group + epsilon).

    Rare successes weigh more: with one success in n samples, it gets n - 1. Scores must not be negative; a group whose mean
    is not positive gets 0, and so does a group of one. Returns equal the advantages.
    """
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        ids_B = as_torch_index(index, scores_B.device)
        mean_B = group_mean(scores_B, ids_B)[ids_B]
        advantages_B = torch.where(mean_B > 0, (scores_B - mean_B) / (mean_B + epsilon), 0.0)
        advantages = advantages_B.unsqueeze(-1) * response_mask
        return advantages, advantages
