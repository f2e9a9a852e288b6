"""`algorithm.*`: advantage estimation and KL control."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """How the coefficient of the KL penalty in the reward moves."""
    kl_coef: float = 0.001
    """The coefficient, or its first value where it adapts."""
    horizon: int = 10000
    """Adaptive only: the number of sequences over which the coefficient closes the gap to `target_kl`."""
    target_kl: float = 0.1
    """Adaptive only: the KL per sequence that the controller steers to."""


@dataclass(frozen=True)
class AlgoConfig:
    adv_estimator: str = "gae"
    """Advantage estimator by registered name, or outside code as `module:function` or `file.py:function`."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group-relative advantages by the group's standard deviation; false gives Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from each token's reward; on where a key of `kl_ctrl` is set and
    this one is not."""
    kl_penalty: str = "kl"
    """KL estimator of the penalty: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
