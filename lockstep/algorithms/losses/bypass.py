"""The loss of bypass mode: old log-probs are the rollout's; the correction uses the current policy."""

from torch import Tensor

from lockstep.algorithms.losses.aggregate import batch_counts
from lockstep.algorithms.losses.gradient import compute_policy_loss_reinforce
from lockstep.algorithms.losses.policy import compute_policy_loss_vanilla, register_policy_loss
from lockstep.algorithms.rollout_correction.correct import correct_tokens
from lockstep.config.actor_rollout_ref import ActorConfig


@register_policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss relative to the rollout's log-probs (`old_log_prob`), with `config.policy_loss.rollout_correction`.

    ppo_clip   the vanilla loss; its ratio already is the importance weight
    reinforce  L = -w A log_prob, with the truncated importance weight w of the current policy over the rollout's

    Both remove rejected tokens from the mask. The mini-batch counts are those before rejection, which is known only after
    each forward. For the same reason `rollout_is_batch_normalize`, a mean over the mini-batch, is an error if this call is
    part of a mini-batch.
    """
    correction = config.policy_loss.rollout_correction
    if correction.rollout_is is not None and correction.rollout_is_batch_normalize and batch_counts(config):
        raise ValueError(
            "algorithm.rollout_correction.rollout_is_batch_normalize=true: the mean weight of a mini-batch is not known "
            "while its micro-batches are processed; set it to false, or algorithm.rollout_correction.bypass_mode=false"
        )
    if not response_mask.any():
        return (log_prob * 0.0).sum(), {}
    weights, mask, metrics = correct_tokens(log_prob, old_log_prob, response_mask, correction)
    if correction.loss_type == "reinforce":
        loss, loss_metrics = compute_policy_loss_reinforce(
            old_log_prob, log_prob, advantages, mask, loss_agg_mode, config, weights
        )
    else:
        loss, loss_metrics = compute_policy_loss_vanilla(
            old_log_prob, log_prob, advantages, mask, loss_agg_mode, config
        )
    return loss, {**loss_metrics, **metrics}
