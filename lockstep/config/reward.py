"""`reward_model.*` and `custom_reward_function.*`: how responses are scored."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II

from lockstep.config.model import FSDPEngineConfig, HFModelConfig
from lockstep.config.profiler import ProfilerConfig


@dataclass(frozen=True)
class RewardModelModelConfig(HFModelConfig):
    path: str = ""
    """A sequence classifier with one label, in the same forms as the actor's path."""
    input_tokenizer: str | None = None
    """The policy's tokenizer, if the reward model's differs: responses are then decoded and encoded again; null if they are the
    same."""
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)


@dataclass(frozen=True)
class RewardFunctionConfig:
    reward_manager: str = "naive"
    """Reward manager: `naive`, `batch`, `dapo`, `prime`, or your own as `module:Class` or `file.py:Class`."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the reward manager, such as `overlong_buffer_cfg` or `num_workers`, the most worker processes (number of
    cores, at most 16; set 1 for a function that loads a model)."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "landlock", "none"] = "auto"
    """Isolation of programs and graders. `auto` is the strongest form that works and an error if none does; `none` accepts that
    a judged program can read your files and use the network."""
    timeout_s: float | None = 300.0
    """Timeout in seconds of one reward function call; on timeout the sample fails (score 0, counted), and three in a row stop the
    run. null has no timeout and calls the function in the trainer's process."""


@dataclass(frozen=True)
class RewardModelConfig(RewardFunctionConfig):
    enable: bool = False
    """Score responses with a model (batch key `rm_scores`)."""
    enable_resource_pool: bool = False
    """Run the reward model in a separate pool of `nnodes` machines with `n_gpus_per_node` workers each."""
    n_gpus_per_node: int = 8
    """Workers per machine, with `enable_resource_pool`."""
    nnodes: int = 0
    """Machines, with `enable_resource_pool`."""
    nccl_timeout: int = II("actor_rollout_ref.nccl_timeout")
    """Timeout of collective operations in seconds."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that split each sequence (Ulysses)."""
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    """Engine of the forward pass; both names mean FSDP2."""
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    micro_batch_size_per_gpu: int | None = None
    """Sequences per forward; null is all."""
    use_dynamic_bsz: bool = II("critic.use_dynamic_bsz")
    """Fill micro-batches by tokens."""
    forward_max_token_len_per_gpu: int = II("critic.forward_max_token_len_per_gpu")
    """Tokens per micro-batch."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    path: str | None = None
    """The reward function as `file.py:function` or `pkg.module:function`, or the file (or `pkg://module`) and `name`; null
    selects a built-in scorer by `data_source`."""
    name: str = "compute_score"
    """Function name, if `path` has none."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call; with `path: null` those of the built-in scorers, such as `method: flexible` or
    `format_score` (gsm8k: 0.1 in training and 0 in validation unless set), and `scorer`, which selects one (`math_reward`,
    `module:function`) for all rows or per `data_source`."""
