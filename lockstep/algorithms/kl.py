"""KL to the reference policy: per-token estimators, the penalty in the reward, controllers of its coefficient."""

from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from lockstep.config.algorithm import KL_ALIASES, KLControlConfig, KLControllerType, KLEstimator
from lockstep.protocol import DataProto
from lockstep.registry import did_you_mean
from lockstep.utils.masked import masked_mean


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled tokens; d = logprob - ref_logprob.

    kl, k1          d                      unbiased, can be negative
    abs             |d|
    mse, k2         d^2 / 2                biased, its gradient is that of the KL
    low_var_kl, k3  exp(-d) - 1 + d        unbiased and never negative; d is clamped to +-20, the result to +-10

    With a trailing `+` (k3+), the value is the estimator's and the gradient is that of k2, which is correct on policy.
    See http://joschu.net/blog/kl-approx.html.
    """
    known = get_args(KLEstimator)
    name = KL_ALIASES.get(kl_penalty, kl_penalty)
    if name not in known:
        raise ValueError(
            f"algorithm.kl_penalty or actor_rollout_ref.actor.kl_loss_type={kl_penalty}: no such KL estimator. "
            f"{did_you_mean(kl_penalty, [*known, *KL_ALIASES])}"
        )
    estimate = _estimate(logprob - ref_logprob, name.removesuffix("+"))
    if not name.endswith("+"):
        return estimate
    k2 = _estimate(logprob - ref_logprob, "mse")
    return estimate.detach() + (k2 - k2.detach())


def _estimate(difference: Tensor, name: str) -> Tensor:
    if name == "kl":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "mse":
        return 0.5 * difference.square()
    # low_var_kl; unclamped, a single token that is likely under the reference would dominate the batch
    difference = difference.clamp(-20.0, 20.0)
    return (torch.exp(-difference) - 1.0 + difference).clamp(-10.0, 10.0)


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """No-op."""


class AdaptiveKLController:
    """A coefficient that adapts to keep the KL at `target_kl` (arXiv:1909.08593, section 2.2).

    value <- value (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon) after n sequences.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if horizon <= 0:
            raise ValueError(f"algorithm.kl_ctrl.horizon={horizon}: must be greater than 0")
        if target_kl <= 0:
            raise ValueError(f"algorithm.kl_ctrl.target_kl={target_kl}: must be greater than 0")
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient after `n_steps` sequences with mean KL `current_kl`."""
        error = float(np.clip(current_kl / self.target_kl - 1.0, -0.2, 0.2))
        self.value *= 1.0 + error * n_steps / self.horizon


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    """The controller configured by `algorithm.kl_ctrl`."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ValueError(
        f"algorithm.kl_ctrl.type={kl_ctrl.type}: no such controller. {did_you_mean(kl_ctrl.type, get_args(KLControllerType))}"
    )


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores minus `kl_ratio` times the k1 estimate of each token."""
    return token_level_scores - kl_ratio * kl_penalty(old_log_prob, ref_log_prob, "k1")


# `apply_kl_penalty` has an argument named `kl_penalty`
_token_kl = kl_penalty


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, Any]]:
    """Write `token_level_rewards`: `token_level_scores` minus the controller's coefficient times each token's KL.

    Reads response_mask, old_log_probs and ref_log_prob; updates the controller with the batch's KL (mean over tokens, then
    over sequences). Returns the same batch and the metrics actor/reward_kl_penalty (that KL) and
    actor/reward_kl_penalty_coeff (the coefficient that was applied).
    """
    batch = data.batch
    assert batch is not None
    mask = batch["response_mask"]
    kl = _token_kl(batch["old_log_probs"], batch["ref_log_prob"], kl_penalty) * mask
    coefficient = kl_ctrl.value
    batch["token_level_rewards"] = batch["token_level_scores"] - coefficient * kl
    current_kl = masked_mean(kl, mask, axis=-1).mean().item()
    kl_ctrl.update(current_kl=current_kl, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": coefficient}
