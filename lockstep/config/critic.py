"""`critic.*`: the value model."""

from dataclasses import dataclass, field

from omegaconf import II

from lockstep.config.actor_rollout_ref import LossAggMode
from lockstep.config.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.megatron import FollowingMcoreEngineConfig
from lockstep.config.model import CheckpointConfig, CriticModelConfig, FSDPOptimizerConfig
from lockstep.config.profiler import ProfilerConfig

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class CriticOptimizerConfig(FSDPOptimizerConfig):
    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


@dataclass(frozen=True)
class CriticConfig:
    enable: bool | None = None
    """Train a critic; null trains one if `algorithm.adv_estimator` needs values."""
    strategy: str = II(f"{_ACTOR}.strategy")
    """Training engine: fsdp or fsdp2 (both mean FSDP2), megatron (docs/megatron.md), deepspeed (docs/deepspeed.md), or your own as
    path/to/file.py:Class (docs/extending.md)."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    megatron: FollowingMcoreEngineConfig = field(default_factory=FollowingMcoreEngineConfig)
    deepspeed: DeepSpeedEngineConfig = field(default_factory=DeepSpeedEngineConfig)
    ppo_mini_batch_size: PositiveInt = II(f"{_ACTOR}.ppo_mini_batch_size")
    """Prompts per optimizer step (times `rollout.n` sequences)."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences per forward/backward; see `actor.ppo_micro_batch_size_per_gpu`."""
    forward_micro_batch_size_per_gpu: PositiveInt | None = II("critic.ppo_micro_batch_size_per_gpu")
    """Sequences per forward of the value pass."""
    use_dynamic_bsz: bool | None = II(f"{_ACTOR}.use_dynamic_bsz")
    """Fill micro-batches by tokens; null as for the actor."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Tokens per micro-batch with `use_dynamic_bsz`."""
    forward_max_token_len_per_gpu: PositiveInt = II("critic.ppo_max_token_len_per_gpu")
    """Tokens per micro-batch of the value pass."""
    ppo_epochs: PositiveInt = II(f"{_ACTOR}.ppo_epochs")
    """Passes over a step's batch."""
    shuffle: bool = II(f"{_ACTOR}.shuffle")
    """Shuffle the batch before it is split into mini-batches."""
    data_loader_seed: int = 42
    """Seed of `shuffle`."""
    cliprange_value: NonNegativeFloat = 0.5
    """Clip range of the value loss around the values computed before the update."""
    loss_agg_mode: LossAggMode = II(f"{_ACTOR}.loss_agg_mode")
    """How token losses are aggregated to a scalar."""
    grad_clip: PositiveFloat = II("critic.optim.clip_grad")
    """Gradients are clipped to this norm."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that split each sequence (Ulysses)."""
    nccl_timeout: PositiveInt = II("actor_rollout_ref.nccl_timeout")
    """Timeout of collective operations in seconds."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
