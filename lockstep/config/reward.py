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
    enable_resource_pool: bool = False
    """Run the reward model on workers of its own, `nnodes` machines with `n_gpus_per_node` each."""
    n_gpus_per_node: int = 8
    """Workers per machine, with `enable_resource_pool`."""
    nnodes: int = 0
    """Machines, with `enable_resource_pool`."""
    nccl_timeout: int = II("actor_rollout_ref.nccl_timeout")
    """Seconds that a worker waits for the others in a collective operation."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
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
    """Reward manager: `naive`, `batch`, `dapo`, `prime`, or a class of yours as `module:Class` or `file.py:Class`."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the reward manager, such as `num_workers` or `overlong_buffer_cfg`."""
    timeout_s: float | None = 300.0
    """Seconds for one call of the reward function; beyond them the sample fails (score 0, counted). null waits for ever,
    and calls the function within the trainer's process."""


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    path: str | None = None
    """Python file (or `pkg://module`) with the scoring function; null scores by `data_source`."""
    name: str = "compute_score"
    """The function in that file."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call; with `path: null` those of the built-in scorers, such as `method: flexible`,
    and `scorer`, which names one (`math_reward`, `module:function`) for all rows or by `data_source`."""
