"""DPPO: tokens are masked by how far their probability moved instead of by the ratio."""

import torch
from torch import Tensor

from lockstep.algorithms.losses.policy import agg_policy_loss, log_ratio_of, register_policy_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.utils.masked import masked_mean


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO-Binary-TV (arXiv:2602.04879): L = -A min(r, c) log_prob while |p - p_old| is within its bound.

    The bound applies in the direction of A: p - p_old <= clip_ratio_high if A > 0, p_old - p <= clip_ratio_low otherwise;
    beyond it a token has no gradient. c is `config.clip_ratio_c`; the ratio is detached. The bounds are differences of
    probabilities; the paper uses 0.15 to 0.2.
    """
    moved = torch.exp(log_prob.detach()) - torch.exp(old_log_prob)
    return _divergence_loss(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, moved, moved.abs()
    )


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO-Binary-KL: like `dppo_tv`, with the KL between (p_old, 1 - p_old) and (p, 1 - p) as the distance."""
    old, new = torch.exp(old_log_prob), torch.exp(log_prob.detach())
    rest = (1.0 - old) * torch.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))
    distance = old * (old_log_prob - log_prob.detach()) + rest
    return _divergence_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        new - old,
        distance,
    )


def _divergence_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None,
    moved: Tensor,
    distance: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """moved: p - p_old, for the direction; distance: how far."""
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = torch.exp(log_ratio.detach())
    too_high = (moved > 0) & (distance > config.clip_ratio_high) & (advantages > 0)
    too_low = (moved < 0) & (distance > config.clip_ratio_low) & (advantages <= 0)
    inside = ~(too_high | too_low)
    loss_mat = -advantages * ratio.clamp(max=config.clip_ratio_c) * log_prob * inside
    loss = agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {
        "actor/pg_clipfrac": masked_mean((~inside).float(), response_mask),
        "actor/ppo_kl": masked_mean(-log_ratio.detach(), response_mask),
        "actor/pg_clipfrac_lower": masked_mean((inside & (ratio > config.clip_ratio_c)).float(), response_mask),
    }
