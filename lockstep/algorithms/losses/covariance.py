"""Losses that restrain the tokens that reduce entropy most: those whose log-prob and advantage covary.

cov_t = (A_t - mean A) (log p_t - mean log p), with means over the tokens of the mini-batch. In training, tokens are selected once
per mini-batch from the old log-probs; a call without that selection uses its own tokens and the current log-probs.
"""

import torch
from torch import Tensor

from lockstep.algorithms.losses.policy import agg_policy_loss, log_ratio_of, register_policy_loss
from lockstep.algorithms.losses.preparation import MiniBatch
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.policy_loss import PolicyLossConfig
from lockstep.utils.masked import masked_mean


def _covariance(log_probs_T: Tensor, advantages_T: Tensor) -> Tensor:
    return (advantages_T - advantages_T.mean()) * (log_probs_T - log_probs_T.mean())


def _clip_candidates(
    covariance_T: Tensor, eligible_T: Tensor, config: PolicyLossConfig, generator: torch.Generator | None
) -> Tensor:
    """Tokens to drop, (T,) bool: `clip_cov_ratio` of all tokens, chosen at random from those between the bounds."""
    between = (covariance_T > config.clip_cov_lb) & (covariance_T < config.clip_cov_ub) & eligible_T
    candidates = between.nonzero().squeeze(-1)
    number = max(int(config.clip_cov_ratio * len(covariance_T)), 1)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    chosen = torch.zeros_like(between)
    chosen[candidates[order[:number]]] = True
    return chosen


def _largest_covariance(covariance_T: Tensor, config: PolicyLossConfig) -> Tensor:
    """Tokens with the largest covariance, (T,) bool: a fraction `kl_cov_ratio`, at least one."""
    chosen = torch.zeros_like(covariance_T, dtype=torch.bool)
    number = min(max(int(config.kl_cov_ratio * len(covariance_T)), 1), len(covariance_T))
    chosen[torch.topk(covariance_T, number).indices] = True
    return chosen


def _mini_batch_covariance(mini_batch: MiniBatch) -> tuple[Tensor, Tensor]:
    """(mask, covariance of its tokens), from the old log-probs."""
    mask = mini_batch.rows["response_mask"].bool()
    return mask, _covariance(mini_batch.rows["old_log_probs"][mask], mini_batch.rows["advantages"][mask])


def choose_clip_cov(mini_batch: MiniBatch, config: ActorConfig) -> dict[str, Tensor]:
    """`dropped` (B, R) bool."""
    mask, covariance_T = _mini_batch_covariance(mini_batch)
    generator = torch.Generator().manual_seed(mini_batch.seed)
    all_tokens = torch.ones_like(covariance_T, dtype=torch.bool)
    dropped = torch.zeros_like(mask)
    dropped[mask] = _clip_candidates(covariance_T, all_tokens, config.policy_loss, generator)
    return {"dropped": dropped}


def choose_kl_cov(mini_batch: MiniBatch, config: ActorConfig) -> dict[str, Tensor]:
    """`penalized` (B, R) bool."""
    mask, covariance_T = _mini_batch_covariance(mini_batch)
    penalized = torch.zeros_like(mask)
    penalized[mask] = _largest_covariance(covariance_T, config.policy_loss)
    return {"penalized": penalized}


@register_policy_loss("clip_cov", prepare=choose_clip_cov)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    dropped: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov (arXiv:2505.22617): PPO's clipped loss without a few tokens of high covariance.

    Drops `clip_cov_ratio` of the tokens, sampled from those with covariance between `clip_cov_lb` and `clip_cov_ub`; dropped
    tokens still count in the denominator. `dropped` (B, R) is the selection over the mini-batch.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    mask = response_mask.bool()
    if dropped is None:
        dropped = torch.zeros_like(mask)
        covariance_T = _covariance(log_prob.detach()[mask], advantages[mask])
        eligible_T = (clipped <= unclipped)[mask]
        dropped[mask] = _clip_candidates(covariance_T, eligible_T, config.policy_loss, None)
    loss_mat = torch.maximum(unclipped, clipped) * ~dropped
    loss = agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {
        "actor/pg_clipfrac": masked_mean(dropped.float(), response_mask),
        "actor/ppo_kl": masked_mean(-log_ratio.detach(), response_mask),
    }


@register_policy_loss("kl_cov", prepare=choose_kl_cov)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    penalized: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov (arXiv:2505.22617): L = -A r, plus `ppo_kl_coef` |log r| at the tokens of largest covariance.

    These are `kl_cov_ratio` of the tokens. `penalized` (B, R) is the selection over the mini-batch.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    mask = response_mask.bool()
    if penalized is None:
        penalized = torch.zeros_like(mask)
        penalized[mask] = _largest_covariance(
            _covariance(log_prob.detach()[mask], advantages[mask]), config.policy_loss
        )
    penalty = config.policy_loss.ppo_kl_coef * log_ratio.abs()
    loss_mat = -advantages * torch.exp(log_ratio) + torch.where(penalized, penalty, 0.0)
    loss = agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {"actor/ppo_kl": masked_mean(log_ratio.detach().abs(), response_mask)}
