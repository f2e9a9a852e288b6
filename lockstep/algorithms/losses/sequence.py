"""Sequence-level losses: one ratio per response, the geometric mean over its tokens."""

import torch
from torch import Tensor

from lockstep.algorithms.losses.aggregate import batch_counts
from lockstep.algorithms.losses.policy import agg_policy_loss, log_ratio_of, register_policy_loss
from lockstep.algorithms.losses.preparation import MiniBatch
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.utils.masked import masked_mean


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (arXiv:2507.18071): PPO's clip on the sequence's ratio s = exp(mean log-ratio of its tokens).

    The value is s at every token, the gradient that of the token: log s_t = log s.detach() + log_prob - log_prob.detach().
    log s is clamped to at most 10. The paper uses loss_agg_mode=seq-mean-token-mean and clip ratios around 3e-4.
    """
    log_ratio = log_prob - old_log_prob
    sequence = masked_mean(log_ratio, response_mask, axis=-1).detach().unsqueeze(-1)
    ratio = torch.exp((log_prob - log_prob.detach() + sequence).clamp(max=10.0))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss_mat = torch.maximum(unclipped, clipped)
    loss = agg_policy_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {
        "actor/pg_clipfrac": masked_mean((clipped > unclipped).float(), response_mask),
        "actor/ppo_kl": masked_mean(-log_ratio.detach(), response_mask),
        "actor/pg_clipfrac_lower": torch.zeros_like(loss.detach()),
    }


def row_shares(mini_batch: MiniBatch, config: ActorConfig) -> dict[str, Tensor]:
    """`row_weights` (B,): 1 / number of rows in the mini-batch."""
    advantages = mini_batch.rows["advantages"]
    return {"row_weights": advantages.new_full((len(advantages),), 1 / max(len(advantages), 1))}


@register_policy_loss("geo_mean", prepare=row_shares)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO (arXiv:2507.20673): L = -A exp(mean of the clipped log-ratios), averaged over the rows.

    A token's log-ratio is clipped to (-clip_ratio_low, clip_ratio_high) if that lowers the objective; A is the mean of the
    row's advantages. `loss_agg_mode` is ignored. `row_weights` are 1 / rows of the mini-batch; by default 1 / rows of this
    call. A row without tokens has loss 0 and is counted. Importance weights are applied by their geometric mean.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    clipped = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    sign = torch.sign(advantages)
    chosen = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio_B = torch.exp(masked_mean(chosen, response_mask, axis=-1))
    loss_B = -masked_mean(advantages, response_mask, axis=-1) * ratio_B
    if rollout_is_weights is not None:
        loss_B = loss_B * torch.exp(masked_mean(torch.log(rollout_is_weights + 1e-10), response_mask, axis=-1))
    dp_size = batch_counts(config).get("dp_size", 1)
    loss = loss_B.mean() if row_weights is None else (loss_B * row_weights).sum() * dp_size
    with torch.no_grad():
        is_clipped = log_ratio != clipped
        metrics = {
            "actor/pg_clipfrac": masked_mean((is_clipped & (advantages > 0)).float(), response_mask),
            "actor/ppo_kl": masked_mean(-log_ratio, response_mask),
            "actor/pg_clipfrac_lower": masked_mean((is_clipped & (advantages < 0)).float(), response_mask),
        }
    return loss, metrics
