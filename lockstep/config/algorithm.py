"""`algorithm.*`: advantage estimation, KL control, corrections and filters of the rollout."""

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
class RolloutCorrectionConfig:
    """What to do about rollouts whose log-probs are not the trainer's. Needs `rollout.calculate_log_probs`."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh the policy loss by the trainer's probability over the rollout's, of each token or of the whole sequence; null
    does not."""
    rollout_is_threshold: float | str = 2.0
    """Largest weight; `low_high` sets weights outside the two to 0."""
    rollout_rs: str | None = None
    """Drop tokens or sequences from the loss that are too far from the trainer's policy: token_k1, token_k2, token_k3,
    seq_sum_k1, seq_mean_k3, seq_max_k2, ..., several with commas."""
    rollout_rs_threshold: float | str | None = None
    """Largest distance kept, one for all of `rollout_rs` or one each with commas; `low_high` for k1, as ratios."""
    bypass_mode: bool = False
    """Take the rollout's log-probs as the old ones and leave their recomputation out."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss of `bypass_mode`: clipped, or plain policy gradient with importance weights."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""


@dataclass(frozen=True)
class PFPPOConfig:
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """How likely a sample is drawn: |score| to a power; only the best and the worst scores; mostly the best."""
    weight_pow: float = 2.0
    """That power."""


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = False
    """Drop prompts whose samples all score the same, and generate on until the batch is full (DAPO)."""
    metric: str | None = None
    """What is compared: score (seq_reward), seq_final_reward (after the KL penalty), or a key that the reward function
    returns, such as acc; null takes score."""
    max_num_gen_batches: int = 0
    """Give up after so many batches of prompts for one step; 0 never does."""


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
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """gdpo: the keys of the reward function's result that are normalized one by one; none takes the score."""
    gdpo_reward_weights: list[float] = field(default_factory=list)
    """gdpo: one weight for each of `gdpo_reward_keys`; none weighs all 1."""
    egpo_lambda: float = 0.4
    """egpo: weight of the entropy bonus in the advantage."""
    egpo_alpha: float = 2.0
    """egpo: the bonus is at most the advantage's size divided by this."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference policy from each token's reward; on where a key of `kl_ctrl` is set and
    this one is not."""
    kl_penalty: str = "kl"
    """KL estimator of the penalty: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = False
    """Draw the batch that is trained on anew from the scored samples, by `pf_ppo` (PF-PPO)."""
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
