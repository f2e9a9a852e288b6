"""verl.workers.config.rollout"""

from dataclasses import InitVar, dataclass

from lockstep.config import actor_rollout_ref
from lockstep.verl._config import resolve_by_hand
from lockstep.verl._names import exports
from lockstep.verl.base_config import DictLike, adapt_sections, assignable
from lockstep.verl.workers.config.optimizer import take

__getattr__ = exports(__name__)


@assignable()
@dataclass(frozen=True)
class SamplingConfig(DictLike, actor_rollout_ref.SamplingConfig): ...


@assignable()
@dataclass(frozen=True)
class CheckpointEngineConfig(DictLike, actor_rollout_ref.CheckpointEngineConfig): ...


@assignable()
@dataclass(frozen=True)
class MultiTurnConfig(DictLike, actor_rollout_ref.MultiTurnConfig): ...


@assignable()
@dataclass(frozen=True)
class ServerConfig(DictLike, actor_rollout_ref.ServerConfig): ...


@assignable()
@dataclass(frozen=True)
class AgentLoopConfig(DictLike, actor_rollout_ref.AgentConfig):
    def __post_init__(self) -> None:
        adapt_sections(self)


@assignable(
    "max_model_len", "load_format", "prompt_length", "response_length", "n", "log_prob_micro_batch_size_per_gpu"
)
@dataclass(frozen=True)
class RolloutConfig(DictLike, actor_rollout_ref.RolloutConfig):
    """The section complete: defaults that follow other keys have their values."""

    log_prob_micro_batch_size: InitVar[int | None] = None

    def __post_init__(self, log_prob_micro_batch_size: int | None) -> None:
        take(self, "log_prob_micro_batch_size_per_gpu", log_prob_micro_batch_size=log_prob_micro_batch_size)
        resolve_by_hand(self, "actor_rollout_ref.rollout")
        adapt_sections(self)
