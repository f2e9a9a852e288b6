"""Losses that hold back the tokens that cost the policy its entropy: those whose log-prob and advantage vary together.

cov_t = (A_t - mean A) (log p_t - mean log p), means over the tokens of the mini-batch. In training the covariance is taken
once for each mini-batch, from the old log-probs, over all of it; a call without that selection takes it over its own
tokens and from the log-probs of the policy that is being trained.
"""

import torch
from torch import Tensor

from lockstep.algorithms.losses.aggregate import agg_loss
from lockstep.algorithms.losses.policy import batch_counts, log_ratio_of, register_policy_loss, weighted
from lockstep.algorithms.losses.preparation import MiniBatch
from lockstep.config.actor_rollout_ref import ActorConfig, PolicyLossConfig
from lockstep.utils.masked import masked_mean


def _covariance(log_probs_T: Tensor, advantages_T: Tensor) -> Tensor:
    return (advantages_T - advantages_T.mean()) * (log_probs_T - log_probs_T.mean())


def _clip_candidates(
    covariance_T: Tensor, eligible_T: Tensor, config: PolicyLossConfig, generator: torch.Generator | None
) -> Tensor:
    """Which tokens (T,) bool to drop: a random `clip_cov_ratio` of all, out of those between the bounds."""
    between = (covariance_T > config.clip_cov_lb) & (covariance_T < config.clip_cov_ub) & eligible_T
    candidates = between.nonzero().squeeze(-1)
    number = max(int(config.clip_cov_ratio * len(covariance_T)), 1)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    chosen = torch.zeros_like(between)
    chosen[candidates[order[:number]]] = True
    return chosen


def _largest(covariance_T: Tensor, config: PolicyLossConfig) -> Tensor:
    """Which tokens (T,) bool have the largest covariance: a share `kl_cov_ratio`, one at least."""
    chosen = torch.zeros_like(covariance_T, dtype=torch.bool)
    number = min(max(int(config.kl_cov_ratio * len(covariance_T)), 1), len(covariance_T))
    chosen[torch.topk(covariance_T, number).indices] = True
    return chosen


def _of_mini_batch(mini_batch: MiniBatch) -> tuple[Tensor, Tensor]:
    """(mask, covariance of its tokens), from the old log-probs."""
    mask = mini_batch.rows["response_mask"].bool()
    return mask, _covariance(mini_batch.rows["old_log_probs"][mask], mini_batch.rows["advantages"][mask])


def choose_clip_cov(mini_batch: MiniBatch, config: ActorConfig) -> dict[str, Tensor]:
    """`dropped` (B, R) bool."""
    mask, covariance_T = _of_mini_batch(mini_batch)
    generator = torch.Generator().manual_seed(mini_batch.seed)
    everything = torch.ones_like(covariance_T, dtype=torch.bool)
    dropped = torch.zeros_like(mask)
    dropped[mask] = _clip_candidates(covariance_T, everything, config.policy_loss, generator)
    return {"dropped": dropped}


def choose_kl_cov(mini_batch: MiniBatch, config: ActorConfig) -> dict[str, Tensor]:
    """`penalized` (B, R) bool."""
    mask, covariance_T = _of_mini_batch(mini_batch)
    penalized = torch.zeros_like(mask)
    penalized[mask] = _largest(covariance_T, config.policy_loss)
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
    """Clip-Cov (arXiv:2505.22617): PPO's clipped loss, and a few tokens of high covariance drop out of it.

    Dropped are `clip_cov_ratio` of the tokens, drawn from those with covariance between `clip_cov_lb` and `clip_cov_ub`;
    they keep their place in the denominator. `dropped` (B, R) is the choice over the mini-batch.
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
    loss_mat = weighted(torch.maximum(unclipped, clipped) * ~dropped, rollout_is_weights)
    loss = agg_loss(loss_mat, response_mask, loss_agg_mode, **batch_counts(config))
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

    Those are `kl_cov_ratio` of the tokens. `penalized` (B, R) is the choice over the mini-batch.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    mask = response_mask.bool()
    if penalized is None:
        penalized = torch.zeros_like(mask)
        penalized[mask] = _largest(_covariance(log_prob.detach()[mask], advantages[mask]), config.policy_loss)
    penalty = config.policy_loss.ppo_kl_coef * log_ratio.abs()
    loss_mat = -advantages * torch.exp(log_ratio) + torch.where(penalized, penalty, 0.0)
    loss = agg_loss(weighted(loss_mat, rollout_is_weights), response_mask, loss_agg_mode, **batch_counts(config))
    return loss, {"actor/ppo_kl": masked_mean(log_ratio.detach().abs(), response_mask)}
