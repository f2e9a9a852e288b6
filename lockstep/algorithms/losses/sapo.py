"""SAPO: a smooth gate on the ratio instead of a clip."""

import torch
from torch import Tensor

from lockstep.algorithms.losses.policy import agg_policy_loss, log_ratio_of, register_policy_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.utils.masked import masked_mean


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO (arXiv:2511.20347): L = -A (4 / tau) sigmoid(tau (r - 1)).

    tau is `config.tau_pos` if A > 0, else `config.tau_neg`. At r = 1 the slope is 1, as without a gate; far from it the
    gradient vanishes. Always aggregated by seq-mean-token-mean, regardless of `loss_agg_mode`.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg)
    gate = torch.sigmoid(tau * (torch.exp(log_ratio) - 1.0)) * (4.0 / tau)
    loss_mat = -advantages * gate
    loss = agg_policy_loss(loss_mat, response_mask, "seq-mean-token-mean", config, rollout_is_weights)
    zero = torch.zeros_like(loss.detach())
    ppo_kl = masked_mean(-log_ratio.detach(), response_mask)
    return loss, {"actor/pg_clipfrac": zero, "actor/ppo_kl": ppo_kl, "actor/pg_clipfrac_lower": zero}
