"""EGPO: group-relative advantages with an entropy bonus."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from lockstep.algorithms.advantages.registry import register_adv_est
from lockstep.config.algorithm import AdvantageEstimator, AlgoConfig
from lockstep.utils.masked import masked_mean


@register_adv_est(AdvantageEstimator.EGPO)
def compute_egpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    entropys: Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """EGPO (arXiv:2508.05118): A' = A + lambda clip(H, -|A| / alpha, |A| / alpha), A the GRPO advantage.

    H is the mean entropy of the response tokens under the rollout policy, treated as a constant. The clip keeps the sign
    of A; a sample with zero advantage gets no bonus. lambda and alpha are `config.egpo_lambda` and
    `config.egpo_alpha`. Returns equal the advantages.
    """
    config = config or AlgoConfig()
    with torch.no_grad():
        advantages, _ = compute_grpo_outcome_advantage(
            token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo
        )
        entropy = masked_mean(entropys, response_mask, axis=-1).unsqueeze(-1)
        bound = advantages.abs() / config.egpo_alpha
        advantages = advantages + config.egpo_lambda * torch.minimum(torch.maximum(entropy, -bound), bound)
        return advantages, advantages
