"""MaxRL: group-relative advantages that approach the gradient of the log-likelihood of success."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import AdvantageEstimator, register_adv_est
from lockstep.utils.groupwise import as_torch_index, group_sum


@register_adv_est(AdvantageEstimator.MAXRL)
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """MaxRL (arXiv:2602.02710): A = (s - mean of the group) / (mean of the group + epsilon).

    Rare successes count more: of n samples with one success, that one gets n - 1. The score must be 0 or more, as a
    correctness is; a group whose mean is not above 0 gets 0. So does a group of one. Returns are the advantages.
    """
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        ids_B = as_torch_index(index, scores_B.device)
        mean_B = (group_sum(scores_B, ids_B) / group_sum(torch.ones_like(scores_B), ids_B))[ids_B]
        advantages_B = torch.where(mean_B > 0, (scores_B - mean_B) / (mean_B + epsilon), 0.0)
        advantages = advantages_B.unsqueeze(-1) * response_mask
        return advantages, advantages
