"""`actor_rollout_ref.actor.policy_loss.*`, and what each built-in policy loss needs, which is known without importing torch."""

from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import II

from lockstep.config.algorithm import RolloutCorrectionConfig
from lockstep.config.bounds import NonNegativeFloat, UnitFloat

_CORRECTION = "algorithm.rollout_correction"


def _inherited_correction() -> RolloutCorrectionConfig:
    """Every key follows `algorithm.rollout_correction`."""
    return RolloutCorrectionConfig(**{f.name: II(f"{_CORRECTION}.{f.name}") for f in fields(RolloutCorrectionConfig)})


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Policy loss: a registered name (see docs/algorithms/policy-losses.md), or your own as `module:function` or
    `file.py:function`."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of your own loss: its keyword-only parameters (docs/extending.md)."""
    clip_cov_ratio: UnitFloat = 0.0002
    """clip_cov: fraction of the mini-batch's tokens whose gradient is dropped."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound on the covariance of dropped tokens."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound on the covariance of dropped tokens."""
    kl_cov_ratio: UnitFloat = 0.0002
    """kl_cov: fraction of the mini-batch's tokens, those with the largest covariance, that get a KL penalty."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """kl_cov: weight of the KL penalty."""
    dro_beta: NonNegativeFloat = 0.1
    """dro: weight of the squared log-ratio."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=_inherited_correction)


@dataclass(frozen=True)
class LossNeeds:
    """What a run knows of a policy loss before it is imported.

    keys:           of `actor_rollout_ref.actor` that this loss reads and others do not.
    is_prepared:    it is registered with a `prepare` function, which reads the old log-probs.
    clips_around_1: its clip ratios are small distances from 1, so that 0.8 and 1.2 are meant as bounds of the ratio.
    """

    keys: tuple[str, ...] = ()
    is_prepared: bool = False
    clips_around_1: bool = False


_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_DUAL_CLIP = (*_CLIP, "clip_ratio_c")

BUILT_IN_LOSSES = {
    "vanilla": LossNeeds(_DUAL_CLIP, clips_around_1=True),
    "bypass_mode": LossNeeds(_DUAL_CLIP, clips_around_1=True),
    "gspo": LossNeeds(_CLIP, clips_around_1=True),
    "geo_mean": LossNeeds(_CLIP, is_prepared=True, clips_around_1=True),
    "clip_cov": LossNeeds(
        (*_CLIP, "policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub"),
        is_prepared=True,
        clips_around_1=True,
    ),
    "kl_cov": LossNeeds(("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"), is_prepared=True),
    "cispo": LossNeeds(_CLIP),
    "dppo_tv": LossNeeds(_DUAL_CLIP),
    "dppo_kl": LossNeeds(_DUAL_CLIP),
    "dro": LossNeeds(("policy_loss.dro_beta",)),
    "gpg": LossNeeds(),
    "sapo": LossNeeds(("tau_pos", "tau_neg")),
}
"""The built-in losses."""
LOSS_NAMES = set(BUILT_IN_LOSSES)
"""Names that `loss_mode` allows; registering another loss adds its name."""
