"""The loss functions that workers pass to their engines, composed from `algorithms`."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.losses.aggregate import agg_loss
from lockstep.algorithms.losses.policy import get_policy_loss_fn, policy_loss_mode
from lockstep.algorithms.losses.value import compute_value_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.critic import CriticConfig
from lockstep.engines.train.base import LossFn
from lockstep.utils.audit import RolloutGap
from lockstep.workers.updates import token_share


def actor_loss_fn(
    config: ActorConfig, info: dict[str, Any], prepared: Iterable[str] = (), gap: RolloutGap | None = None
) -> LossFn:
    """Policy loss, minus the entropy bonus, plus the KL to the reference.

    prepared: names of the columns from `prepare_policy_loss`.
    gap: collects the difference between the rollout's log-probs and the current policy's.

    Rows have no `old_log_probs` if the update is the only one of its step: the current log-probs are the old ones then.
    """
    policy_loss = get_policy_loss_fn(policy_loss_mode(config))
    prepared = tuple(prepared)
    counted = dataclasses.replace(config, global_batch_info=info)

    def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        mask, log_probs = rows["response_mask"], outputs["log_probs"]
        if gap is not None and "rollout_log_probs" in rows:
            gap.add(rows["rollout_log_probs"], log_probs, mask)
        loss, token_means = policy_loss(
            old_log_prob=rows["old_log_probs"] if "old_log_probs" in rows else log_probs.detach(),
            log_prob=log_probs,
            advantages=rows["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=counted,
            rollout_is_weights=rows.get("rollout_is_weights", None),
            **{name: rows[name] for name in prepared},
        )
        share = token_share(mask, info)
        metrics = {name: share * value for name, value in token_means.items()}  # a user's loss may return plain numbers
        metrics["actor/pg_loss"] = loss
        if "entropy" in outputs:
            entropy = agg_loss(outputs["entropy"], mask, config.loss_agg_mode, **info)
            metrics["actor/entropy"] = entropy
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = kl_penalty(log_probs, rows["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(kl, mask, config.loss_agg_mode, **info)
            metrics["actor/kl_loss"] = kl_loss
            loss = loss + config.kl_loss_coef * kl_loss
        return loss, metrics

    return loss_fn


def critic_loss_fn(config: CriticConfig, info: dict[str, Any]) -> LossFn:
    """Squared error between values and returns, clipped around the old values."""

    def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        mask = rows["response_mask"]
        loss, clip_fraction = compute_value_loss(
            vpreds=outputs["values"],
            returns=rows["returns"],
            values=rows["values"],
            response_mask=mask,
            cliprange_value=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
            **info,
        )
        share = token_share(mask, info)
        mean_value = (outputs["values"] * mask).sum() / max(info["batch_num_tokens"], 1)
        return loss, {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": share * clip_fraction,
            "critic/vpred_mean": mean_value,
        }

    return loss_fn
