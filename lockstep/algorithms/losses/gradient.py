"""Losses whose gradient is a weight times the gradient of log_prob: GPG, CISPO, DRO and REINFORCE."""

import torch
from torch import Tensor

from lockstep.algorithms.losses.policy import agg_policy_loss, log_ratio_of, register_policy_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.utils.masked import masked_mean


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GPG (arXiv:2504.02546): L = -A log_prob, the plain policy gradient; old log-probs are ignored."""
    loss_mat = -advantages * log_prob
    return agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights), {}


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (arXiv:2506.13585): L = -A log_prob clip(r, 1 - low, 1 + high), with the clipped ratio detached.

    Every token keeps its gradient, even if PPO would clip it. The paper bounds r only from above: set `clip_ratio_low` to 1
    or more for that.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = torch.exp(log_ratio.detach())
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss_mat = -advantages * clipped * log_prob
    loss = agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {
        "actor/pg_clipfrac": masked_mean((ratio != clipped).float(), response_mask),
        "actor/ppo_kl": masked_mean(-log_ratio.detach(), response_mask),
        "actor/pg_clipfrac_lower": torch.zeros_like(loss.detach()),
    }


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DRO (arXiv:2405.19107): L = -(A log_prob - beta / 2 (log r)^2), with beta = `config.policy_loss.dro_beta`."""
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    loss_mat = -(advantages * log_prob - 0.5 * config.policy_loss.dro_beta * log_ratio**2)
    loss = agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {"actor/ppo_kl": masked_mean(-log_ratio.detach(), response_mask)}


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = -w A log_prob, with importance weights w if given."""
    loss_mat = -advantages * log_prob
    loss = agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {"actor/ppo_kl": masked_mean((rollout_log_prob - log_prob).detach(), response_mask)}
