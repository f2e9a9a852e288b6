"""OPO: the variance-optimal baseline if gradient norms grow with the response length."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import by_group, register_adv_est
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.utils.groupwise import as_torch_index, group_mean, group_sum


@register_adv_est(AdvantageEstimator.OPO)
@by_group
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """OPO (arXiv:2505.23585): A = s - (sum of length times score / sum of lengths) over the group.

    A group of one, or without any token, keeps its raw score. Returns equal the advantages.
    """
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        length_B = response_mask.sum(dim=-1).to(scores_B.dtype)
        ids_B = as_torch_index(index, scores_B.device)
        count_G, length_G = group_sum(torch.stack((torch.ones_like(scores_B), length_B), 1), ids_B).unbind(1)
        baseline_G = group_mean(scores_B, ids_B, length_B).masked_fill((count_G == 1) | (length_G == 0), 0.0)
        advantages = (scores_B - baseline_G[ids_B]).unsqueeze(-1) * response_mask
        return advantages, advantages
