"""`algorithm.*`: advantage estimation, KL control, rollout correction and filtering of samples."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from lockstep.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat

KLEstimator = Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+"]
KL_ESTIMATORS = tuple(name for name in get_args(KLEstimator) if not name.endswith("+"))
KL_ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k1+": "kl+", "k2+": "mse+", "k3+": "low_var_kl+"}
"""Other names of the KL estimators, after http://joschu.net/blog/kl-approx.html."""

KLControllerType = Literal["fixed", "adaptive"]
ImportanceLevel = Literal["token", "sequence"]
ReweightMethod = Literal["pow", "max_min", "max_random"]


@dataclass(frozen=True)
class KLControlConfig:
    type: KLControllerType = "fixed"
    """Whether the coefficient of the KL penalty in the reward is constant or adapts to `target_kl`."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient, or its initial value if it adapts."""
    horizon: PositiveInt = 10000
    """Adaptive only: number of sequences over which the coefficient adapts."""
    target_kl: PositiveFloat = 0.1
    """Adaptive only: target KL per sequence."""


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction for rollouts whose log-probs differ from the trainer's. Needs `rollout.calculate_log_probs`."""

    rollout_is: ImportanceLevel | None = None
    """Weight the policy loss by importance ratios (trainer over rollout), per token or per sequence; null does not."""
    rollout_is_threshold: float | str = 2.0
    """Upper bound of the weights; `low_high` sets weights outside these bounds to 0."""
    rollout_rs: str | None = None
    """Rejection criteria that remove tokens or sequences too far from the trainer's policy: token_k1, token_k2, token_k3,
    seq_sum_k1, seq_mean_k3, seq_max_k2, ...; separate several with commas."""
    rollout_rs_threshold: float | str | None = None
    """Largest distance kept: one value, or one per criterion separated by commas; `low_high` for k1, as ratios."""
    bypass_mode: bool = False
    """Use the rollout's log-probs as the old log-probs and skip recomputing them."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss of `bypass_mode`: PPO's clipped loss, or REINFORCE with importance weights."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""


@dataclass(frozen=True)
class PFPPOConfig:
    reweight_method: ReweightMethod = "pow"
    """Sampling weights: |score| to a power; only the best and the worst scores; mostly the best."""
    weight_pow: float = 2.0
    """The power of `reweight_method=pow`."""


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = False
    """Drop prompts whose samples all have the same score, and generate more until the batch is full (DAPO)."""
    metric: str | None = None
    """What is compared: score (or seq_reward), or a column that the reward function returns, such as acc; null is score."""
    max_num_gen_batches: NonNegativeInt = 0
    """Stop with an error after generating this many batches of prompts for one step; 0 is no limit."""


_GROUP = ("index",)
_STD = ("norm_adv_by_std_in_grpo",)


class AdvantageEstimator(StrEnum):
    """The built-in estimators: name in `algorithm.adv_estimator`, batch keys that it needs, keys of `algorithm` that it reads.

    values:           from a critic.
    index:            the prompt of each sample (its uid): the estimator compares the samples of one prompt.
    reward_baselines: scores of a greedy rollout.
    The other batch keys come with the old log-probs.
    """

    inputs: frozenset[str]
    keys: frozenset[str]

    def __new__(cls, name: str, inputs: Iterable[str] = (), keys: Iterable[str] = ()) -> "AdvantageEstimator":
        member = str.__new__(cls, name)
        member._value_ = name
        member.inputs = frozenset(inputs)
        member.keys = frozenset(keys)
        return member

    GAE = "gae", ("values",), ("gamma", "lam")
    GRPO = "grpo", _GROUP, _STD
    GRPO_VECTORIZED = "grpo_vectorized", _GROUP, _STD
    GRPO_PASSK = "grpo_passk", _GROUP, _STD
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus", (), ("gamma",)
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline", _GROUP
    REMAX = "remax", ("reward_baselines",)
    RLOO = "rloo", _GROUP
    RLOO_VECTORIZED = "rloo_vectorized", _GROUP
    OPO = "opo", _GROUP
    GPG = "gpg", _GROUP
    GDPO = "gdpo", _GROUP, (*_STD, "gdpo_reward_keys", "gdpo_reward_weights")
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline", (*_GROUP, "old_log_probs", "sum_pi_squared")
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline", (*_GROUP, "old_log_probs", "sum_pi_squared")
    MAXRL = "maxrl", _GROUP
    EGPO = "egpo", (*_GROUP, "entropys"), (*_STD, "egpo_lambda", "egpo_alpha")


@dataclass(frozen=True)
class AlgoConfig:
    adv_estimator: str = "gae"
    """Advantage estimator: a registered name (see docs/algorithms/advantages.md), or your own as `module:function` or
    `file.py:function`."""
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of your own estimator: its keyword-only parameters (docs/extending.md)."""
    gamma: UnitFloat = 1.0
    """Discount per token."""
    lam: UnitFloat = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group-relative advantages by the group's standard deviation; false is Dr.GRPO."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """gdpo: columns of the reward function's result that are normalized separately; empty uses the score."""
    gdpo_reward_weights: list[float] = field(default_factory=list)
    """gdpo: one weight per key of `gdpo_reward_keys`; empty weights all by 1."""
    egpo_lambda: NonNegativeFloat = 0.4
    """egpo: weight of the entropy bonus in the advantage."""
    egpo_alpha: PositiveFloat = 2.0
    """egpo: the bonus is at most |advantage| divided by this."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from each token's reward; defaults to true if a key of `kl_ctrl` is
    set."""
    kl_penalty: KLEstimator = "kl"
    """KL estimator of the penalty: kl (k1), abs, mse (k2), low_var_kl (k3); `+` uses the gradient of mse."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = False
    """Resample the training batch from the scored samples, weighted by `pf_ppo` (PF-PPO)."""
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
