"""Group-relative advantages: each sample relative to the other samples of its prompt, without a critic."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.registry import by_group, register_adv_est
from lockstep.config.algorithm import AdvantageEstimator, AlgoConfig
from lockstep.utils.groupwise import as_torch_index, group_mean_std


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
@register_adv_est(AdvantageEstimator.GRPO)
@by_group
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GRPO (arXiv:2402.03300): A = (s - mean of the group) / (std of the group + epsilon), the same for every token.

    s is the sum of a sample's token rewards, `index` the sample's prompt; the standard deviation is unbiased. Without
    `norm_adv_by_std_in_grpo` there is no division (Dr.GRPO, arXiv:2503.20783). A group of one keeps its raw score; a group
    with equal scores gets 0. Returns equal the advantages. verl's vectorized variant computes the same.
    """
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        ids_B = as_torch_index(index, scores_B.device)
        mean_G, std_G, _ = group_mean_std(scores_B, ids_B, eps=0.0)
        advantages_B = scores_B - mean_G[ids_B]
        if norm_adv_by_std_in_grpo:
            advantages_B = advantages_B / (std_G[ids_B] + epsilon)
        advantages = advantages_B.unsqueeze(-1) * response_mask
        return advantages, advantages


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
@by_group
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: AlgoConfig | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Pass@k (arXiv:2503.19595): only a group's best sample gets an advantage, its margin over the second best.

    The margin is divided by the group's standard deviation as in GRPO unless `config.norm_adv_by_std_in_grpo` is false. If
    two samples share the best score, all get 0. A group of one is an error. Returns equal the advantages.
    """
    with torch.no_grad():
        scores_B = token_level_rewards.sum(dim=-1)
        ids_B = as_torch_index(index, scores_B.device)
        _, std_G, count_G = group_mean_std(scores_B, ids_B, eps=0.0)
        if (count_G < 2).any():
            raise ValueError(
                "algorithm.adv_estimator=grpo_passk needs at least 2 samples per prompt: set "
                "actor_rollout_ref.rollout.n to 2 or more"
            )
        advantages_B = torch.zeros_like(scores_B)
        for group in range(len(count_G)):
            rows = (ids_B == group).nonzero().squeeze(-1)
            (first, second), places = torch.topk(scores_B[rows], 2)
            advantages_B[rows[places[0]]] = first - second
        if config is None or config.norm_adv_by_std_in_grpo:
            advantages_B = advantages_B / (std_G[ids_B] + epsilon)
        advantages = advantages_B.unsqueeze(-1) * response_mask
        return advantages, advantages
