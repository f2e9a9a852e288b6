"""Policy losses: the registry, and PPO's clipped loss under the name `vanilla`.

Select one with `actor_rollout_ref.actor.policy_loss.loss_mode`; add your own with `@register_policy_loss("name")`, or select it
as `module:function`. Every loss has the signature `PolicyLossFn`; one that needs statistics of the whole mini-batch is
registered with a `prepare` function (see `preparation.py`). Keyword-only parameters are settings of the loss, set by
`actor_rollout_ref.actor.policy_loss.loss_kwargs` (see `config/plugin_settings.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.algorithms.losses.aggregate import agg_loss, batch_counts
from lockstep.algorithms.losses.preparation import MiniBatch, Prepare
from lockstep.algorithms.rollout_correction.weights import MAX_LOG_RATIO
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.plugin_settings import LOSS_KEY, PREPARE, loss_settings
from lockstep.config.policy_loss import LOSS_NAMES
from lockstep.registry import Registry
from lockstep.utils.masked import masked_mean


class PolicyLossFn(Protocol):
    """(B, R) tensors to the loss and its metrics.

    Losses are summed over micro-batches; metrics are detached scalar tensors, means over this call's tokens.
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


POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", key=LOSS_KEY, names=LOSS_NAMES)


def register_policy_loss(name: str, prepare: Prepare | None = None) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: register the function as `name`; `prepare` computes tensors from the whole mini-batch for it."""

    def enter(loss: PolicyLossFn) -> PolicyLossFn:
        if prepare is not None:
            setattr(loss, PREPARE, prepare)
        return POLICY_LOSSES.register(name)(loss)

    return enter


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss registered as `name`, or outside code if `name` is `module:function`."""
    return POLICY_LOSSES.get(name)


def policy_loss_mode(config: ActorConfig) -> str:
    """`policy_loss.loss_mode`; in bypass mode, vanilla is replaced by the loss that applies the rollout correction."""
    bypass = config.policy_loss.rollout_correction.bypass_mode and config.policy_loss.loss_mode == "vanilla"
    return "bypass_mode" if bypass else config.policy_loss.loss_mode


def with_loss_settings(config: ActorConfig) -> ActorConfig:
    """The config with all settings of its policy loss in `policy_loss.loss_kwargs`, typed; ConfigError if one is wrong."""
    settings = loss_settings(get_policy_loss_fn(policy_loss_mode(config)), config.policy_loss.loss_kwargs)
    return dataclasses.replace(config, policy_loss=dataclasses.replace(config.policy_loss, loss_kwargs=settings))


def prepare_policy_loss(name: str, rows: Mapping[str, Tensor], config: ActorConfig, seed: int = 0) -> dict[str, Tensor]:
    """Extra arguments of the loss `name`, one entry per row; call once per mini-batch.

    Add the tensors to the rows and pass each micro-batch's part to the loss under the same names. Most losses have none.
    Without them, a loss computes its statistics over the rows of the call.
    """
    prepare = preparation_of(name)
    return {} if prepare is None else prepare(MiniBatch(rows, seed), with_loss_settings(config))


def preparation_of(name: str) -> Prepare | None:
    """The `prepare` function of the loss `name`, if it has one."""
    return getattr(get_policy_loss_fn(name), PREPARE, None)


def log_ratio_of(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log_prob - old_log_prob, clamped to +-20."""
    return (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted(loss_mat: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    return loss_mat if rollout_is_weights is None else loss_mat * rollout_is_weights


def agg_policy_loss(
    loss_mat: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> Tensor:
    """`agg_loss` of the tokens' losses, multiplied by the importance weights if given."""
    return agg_loss(weighted(loss_mat, rollout_is_weights), response_mask, loss_agg_mode, **_counts(config))


def _counts(config: ActorConfig) -> dict[str, Any]:
    """The keyword arguments of `agg_loss`."""
    return {"loss_scale_factor": config.loss_scale_factor} | batch_counts(config)


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
    """PPO's clipped loss, with clip ranges and mini-batch counts from the actor's config."""
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
        **_counts(config),
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
    """Clipped, dual-clipped policy loss: (loss, clip fraction, mean negative log-ratio, dual-clip fraction).

    r = exp(log_prob - old_log_prob);  L = max(-A r, -A clip(r, 1 - low, 1 + high));  if A < 0: L = min(L, -A c)

    PPO (arXiv:1707.06347); high > low is DAPO's clip-higher (arXiv:2503.14476); c > 1 is the dual clip, which bounds the loss
    of a token with negative advantage (arXiv:1912.09729). `rollout_is_weights` multiplies each token's loss. The log-ratio is
    clamped to +-20. The three statistics are detached and over this call's tokens.
    """
    if clip_ratio_c <= 1.0:
        raise ValueError(f"actor_rollout_ref.actor.clip_ratio_c={clip_ratio_c}: must be greater than 1")
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
