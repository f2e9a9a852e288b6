"""GPG: group-relative advantages, scaled up to make up for samples with score 0."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import register_adv_est
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.utils.groupwise import as_torch_index, group_mean_std


@register_adv_est(AdvantageEstimator.GPG)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, f_norm: float = 1.0, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """GPG (arXiv:2504.02546): A = alpha (s - mean of the group) / f_norm, alpha = samples / samples with a nonzero score.

    A group of one keeps its raw score, times alpha / f_norm. Returns equal the advantages.
    """
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        ids_B = as_torch_index(index, scores_B.device)
        mean_G, _, _ = group_mean_std(scores_B, ids_B)
        alpha = len(scores_B) / scores_B.count_nonzero().clamp(min=1)
        advantages = (alpha * (scores_B - mean_G[ids_B]) / f_norm).unsqueeze(-1) * response_mask
        return advantages, advantages
