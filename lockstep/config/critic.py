"""`critic.*`: the value model."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II

from lockstep.config.model import CheckpointConfig, CriticModelConfig, FSDPOptimizerConfig

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class CriticOptimizerConfig(FSDPOptimizerConfig):
    lr: float = 1e-5
    """Peak learning rate."""


@dataclass(frozen=True)
class CriticConfig:
    enable: bool | None = None
    """Train a critic; null does so where `algorithm.adv_estimator` needs values (gae)."""
    strategy: Literal["fsdp", "fsdp2"] = II(f"{_ACTOR}.strategy")
    """Training engine; both names mean FSDP2."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    ppo_mini_batch_size: int = II(f"{_ACTOR}.ppo_mini_batch_size")
    """Prompts in one optimizer step (times `rollout.n` sequences)."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward/backward; null takes the whole mini-batch."""
    forward_micro_batch_size_per_gpu: int | None = II("critic.ppo_micro_batch_size_per_gpu")
    """Sequences in one forward of the value pass."""
    use_dynamic_bsz: bool = II(f"{_ACTOR}.use_dynamic_bsz")
    """Fill micro-batches by tokens."""
    ppo_max_token_len_per_gpu: int = 32768
    """Tokens in one micro-batch with `use_dynamic_bsz`."""
    forward_max_token_len_per_gpu: int = II("critic.ppo_max_token_len_per_gpu")
    """Tokens in one micro-batch of the value pass."""
    ppo_epochs: int = II(f"{_ACTOR}.ppo_epochs")
    """Passes over a step's batch."""
    shuffle: bool = II(f"{_ACTOR}.shuffle")
    """Shuffle the batch before it is cut into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffling."""
    cliprange_value: float = 0.5
    """How far a value may move from the one of the rollout before its loss is clipped."""
    loss_agg_mode: str = II(f"{_ACTOR}.loss_agg_mode")
    """How token losses become one number."""
    grad_clip: float = II("critic.optim.clip_grad")
    """Largest gradient norm."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
    nccl_timeout: int = II("actor_rollout_ref.nccl_timeout")
    """Seconds that a worker waits for the others in a collective operation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rollout_n: int = II("actor_rollout_ref.rollout.n")
    """Samples per prompt; follows `rollout.n`."""
    global_batch_info: dict[str, Any] = field(default_factory=dict, metadata={"internal": True})
    """Set by the worker, not by users: see `ActorConfig.global_batch_info`."""
