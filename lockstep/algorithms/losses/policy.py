"""Policy losses: the registry, and PPO's clipped loss under the name `vanilla`.

Select one with `actor_rollout_ref.actor.policy_loss.loss_mode`; add one with `@register_policy_loss("name")` or name
outside code as `module:function`. Every loss has the signature `PolicyLossFn`; one that needs statistics of the whole
mini-batch is registered with a `prepare` (see `preparation.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.algorithms.losses.aggregate import agg_loss
from lockstep.algorithms.losses.preparation import MiniBatch, Prepare
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.registry import Registry
from lockstep.utils.masked import masked_mean

# exp of a larger log-ratio says nothing more, but overflows
MAX_LOG_RATIO = 20.0


class PolicyLossFn(Protocol):
    """(B, R) tensors to the loss and its metrics.

    The loss is to be summed over micro-batches; the metrics are detached scalar tensors, means over this call's tokens.
    """

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: ActorConfig,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", key="actor_rollout_ref.actor.policy_loss.loss_mode")


PREPARATIONS: dict[str, Prepare] = {}
"""Name of a policy loss to what it must know of the whole mini-batch."""


def register_policy_loss(name: str, prepare: Prepare | None = None) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: make the function selectable as `name`; `prepare` gives it tensors of the whole mini-batch."""

    def enter(loss: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSSES.register(name)(loss)
        if prepare is not None:
            PREPARATIONS[name] = prepare
        return loss

    return enter


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss registered as `name`, or outside code where `name` is `module:function`."""
    return POLICY_LOSSES.get(name)


def policy_loss_mode(config: ActorConfig) -> str:
    """`policy_loss.loss_mode`; in bypass mode PPO's loss is the one that corrects against the policy in training."""
    bypass = config.policy_loss.rollout_correction.bypass_mode and config.policy_loss.loss_mode == "vanilla"
    return "bypass_mode" if bypass else config.policy_loss.loss_mode


def prepare_policy_loss(name: str, rows: Mapping[str, Tensor], config: ActorConfig, seed: int = 0) -> dict[str, Tensor]:
    """What the loss `name` takes beside its signature, one entry per row; call once for each mini-batch.

    Put the tensors among the rows and hand each micro-batch's part to the loss under the same names. Most losses take
    none. Without them a loss takes its statistics over the call's own rows.
    """
    prepare = PREPARATIONS.get(name)
    return {} if prepare is None else prepare(MiniBatch(rows, seed), config)


def log_ratio_of(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log_prob - old_log_prob, held within +-20."""
    return (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted(loss_mat: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    return loss_mat if rollout_is_weights is None else loss_mat * rollout_is_weights


def batch_counts(config: ActorConfig) -> dict[str, Any]:
    """The keyword arguments of `agg_loss` that the config carries: the mini-batch's counts and the scale factor."""
    return {"loss_scale_factor": config.loss_scale_factor, **config.global_batch_info}


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with the clip ranges and the mini-batch's counts of the actor's config."""
    loss, clipfrac, ppo_kl, clipfrac_lower = compute_policy_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        cliprange=config.clip_ratio,
        cliprange_low=config.clip_ratio_low,
        cliprange_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
        loss_agg_mode=loss_agg_mode,
        rollout_is_weights=rollout_is_weights,
        **batch_counts(config),
    )
    return loss, {"actor/pg_clipfrac": clipfrac, "actor/ppo_kl": ppo_kl, "actor/pg_clipfrac_lower": clipfrac_lower}


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
    rollout_is_weights: Tensor | None = None,
    **counts: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clipped, dual-clipped policy loss: (loss, share clipped, mean log-ratio, share clipped by the dual clip).

    r = exp(log_prob - old_log_prob);  L = max(-A r, -A clip(r, 1 - low, 1 + high));  where A < 0: L = min(L, -A c)

    PPO (arXiv:1707.06347); unequal low and high are DAPO's clip-higher (arXiv:2503.14476); the bound c > 1 on what one
    disliked token can cost is dual clip (arXiv:1912.09729). `rollout_is_weights` multiplies each token's loss.
    The log-ratio is held within +-20. The three statistics are detached and over this call's tokens.
    """
    if clip_ratio_c <= 1.0:
        raise ValueError(f"actor_rollout_ref.actor.clip_ratio_c={clip_ratio_c}: the dual clip must be greater than 1")
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high

    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    ppo = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    loss_mat = torch.where(advantages < 0, torch.minimum(ppo, bound), ppo)
    loss = agg_loss(weighted(loss_mat, rollout_is_weights), response_mask, loss_agg_mode, **counts)

    with torch.no_grad():
        is_clipped, is_bound = clipped > unclipped, (ppo > bound) & (advantages < 0)
        statistics = torch.stack([is_clipped.float(), -log_ratio, is_bound.float()])
        clipfrac, ppo_kl, clipfrac_lower = masked_mean(statistics, response_mask, axis=(1, 2))
    return loss, clipfrac, ppo_kl, clipfrac_lower
