"""A policy loss: REINFORCE on tokens whose ratio is near 1, without a gradient for the others.

actor_rollout_ref.actor.policy_loss.loss_mode=examples/plugins/loss.py:near_policy
actor_rollout_ref.actor.policy_loss.loss_kwargs.width=0.1
"""

from lockstep.algorithms.losses import agg_loss, register_policy_loss
from lockstep.config.bounds import PositiveFloat
from lockstep.utils.masked import masked_mean


@register_policy_loss("near_policy")
def near_policy(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode,
    config,
    rollout_is_weights=None,
    *,
    width: PositiveFloat = 0.2,
):
    """(B, R) tensors -> the loss, aggregated by `agg_loss`, and metrics over this call's tokens.

    width: a setting; the largest distance of a ratio from 1.
    """
    ratio = (log_prob - old_log_prob).detach().exp()
    is_near = ((ratio - 1).abs() <= width).float()
    loss = agg_loss(-advantages * log_prob * is_near, response_mask, loss_agg_mode)
    return loss, {"actor/near_fraction": masked_mean(is_near, response_mask)}
