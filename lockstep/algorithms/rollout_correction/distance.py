"""Metrics of the distance between the rollout's policy and the trainer's."""

import torch
from torch import Tensor

from lockstep.algorithms.rollout_correction.summary import Metrics
from lockstep.algorithms.rollout_correction.weights import MAX_LOG_RATIO
from lockstep.utils.masked import masked_mean, masked_sum


def compute_offpolicy_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Metrics:
    """KL(rollout || trainer) by two estimators, both perplexities and their ratio, token and sequence chi-squared.

    Perplexities are computed per sequence, then averaged. training_* is the policy of `old_log_prob`.
    """
    old, rollout = old_log_prob.detach(), rollout_log_prob.detach()
    log_ratio = old - rollout
    training_B = -masked_mean(old, response_mask, axis=-1)
    rollout_B = -masked_mean(rollout, response_mask, axis=-1)
    difference_B = training_B - rollout_B
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clamped_B = masked_sum(log_ratio, response_mask, axis=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "training_ppl": training_B.exp().mean(),
        "training_log_ppl": training_B.mean(),
        "kl": masked_mean(-log_ratio, response_mask),
        "k3_kl": masked_mean(torch.exp(log_ratio) - log_ratio - 1.0, response_mask),
        "rollout_ppl": rollout_B.exp().mean(),
        "rollout_log_ppl": rollout_B.mean(),
        "log_ppl_diff": difference_B.mean(),
        "log_ppl_abs_diff": difference_B.abs().mean(),
        "log_ppl_diff_max": difference_B.max(),
        "log_ppl_diff_min": difference_B.min(),
        "ppl_ratio": difference_B.exp().mean(),
        "chi2_token": masked_mean(torch.exp(clamped) ** 2, response_mask) - 1.0,
        "chi2_seq": torch.exp(2.0 * clamped_B).mean() - 1.0,
    }
