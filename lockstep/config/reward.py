"""`reward_model.*` and `custom_reward_function.*`: where scores come from."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II

from lockstep.config.model import FSDPEngineConfig, HFModelConfig


@dataclass(frozen=True)
class RewardModelModelConfig(HFModelConfig):
    path: str = ""
    """Local folder of a sequence classifier with one label."""
    input_tokenizer: str | None = None
    """Tokenizer of the policy, where the reward model's differs: its text is then encoded anew; null where both are
    one."""
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)


@dataclass(frozen=True)
class RewardModelConfig:
    enable: bool = False
    """Score responses with a model (batch key `rm_scores`)."""
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    """Engine of the forward pass."""
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward; null takes all."""
    use_dynamic_bsz: bool = II("critic.use_dynamic_bsz")
    """Fill micro-batches by tokens."""
    forward_max_token_len_per_gpu: int = II("critic.forward_max_token_len_per_gpu")
    """Tokens in one micro-batch."""
    reward_manager: str = "naive"
    """Reward manager by registered name."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the reward manager."""


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    path: str | None = None
    """Python file (or `pkg://module`) with the scoring function; null scores by `data_source`."""
    name: str = "compute_score"
    """The function in that file."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call; with `path: null` those of the built-in scorers, such as `method: flexible`."""
