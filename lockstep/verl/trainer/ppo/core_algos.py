"""verl.trainer.ppo.core_algos: advantages, losses and KL."""

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.algorithms import advantages, losses
from lockstep.algorithms.advantages import (
    AdvantageEstimator,
    AdvantageFn,
    compute_gae_advantage_return,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_opo_outcome_advantage,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from lockstep.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from lockstep.algorithms.losses import (
    PolicyLossFn,
    agg_loss,
    compute_entropy_loss,
    compute_policy_loss_bypass_mode,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_kl_cov,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
    compute_value_loss,
    get_policy_loss_fn,
    register_policy_loss as register_loss,
)
from lockstep.algorithms.losses.policy import POLICY_LOSSES
from lockstep.algorithms.pf_ppo import compute_pf_ppo_reweight_data
from lockstep.config.algorithm import AlgoConfig
from lockstep.verl._registry import RegistryView
from lockstep.verl.base_config import dict_like

ADV_ESTIMATOR_REGISTRY = RegistryView(advantages.ADVANTAGE_ESTIMATORS)
POLICY_LOSS_REGISTRY = RegistryView(POLICY_LOSSES)
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "PolicyLossFn",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]


class PolicyLoss(NamedTuple):
    """The loss and its statistics, to unpack as `loss, clipfrac, kl, clipfrac_lower`; or used as the loss itself."""

    loss: Tensor
    clipfrac: Tensor
    ppo_kl: Tensor
    clipfrac_lower: Tensor

    def backward(self, **options: Any) -> None:
        self.loss.backward(**options)

    def item(self) -> float:
        return float(self.loss.item())

    def detach(self) -> Tensor:
        return self.loss.detach()


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    *options: Any,
    clip_ratio: float | None = None,
    **more: Any,
) -> PolicyLoss:
    """PPO's clipped loss. clip_ratio: the same as `cliprange`, by the name of the config; 0.2 if neither is given.

    The other options are those of `lockstep.algorithms.losses.compute_policy_loss`.
    """
    if cliprange is not None and clip_ratio is not None:
        raise TypeError("compute_policy_loss: cliprange and clip_ratio are the same; give one of them")
    given = [value for value in (cliprange, clip_ratio, 0.2) if value is not None]
    return PolicyLoss(
        *losses.compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, given[0], *options, **more)
    )


def compute_reinforce_plus_plus_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The estimator `reinforce_plus_plus`: (advantages, returns)."""
    return compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards, response_mask, config=AlgoConfig(gamma=gamma)
    )


def register_adv_est(name_or_enum: str | Enum) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: register an estimator by name, or by the value of an enum."""
    return advantages.register_adv_est(_name(name_or_enum))


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageFn:
    return advantages.get_adv_estimator_fn(_name(name_or_enum))


def _name(name_or_enum: str | Enum) -> str:
    return str(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)


def register_policy_loss(name: str, **options: Any) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: register a policy loss, whose `config` also reads like a mapping (`config.get("clip_ratio_c", 3.0)`)."""

    def enter(loss: PolicyLossFn) -> PolicyLossFn:
        @functools.wraps(loss)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("config") is not None:
                kwargs["config"] = dict_like(kwargs["config"])
            return loss(*args, **kwargs)

        register_loss(name, **options)(call)
        return loss

    return enter
