"""verl.workers.config: sections that a program may construct itself, with every default filled in."""

from dataclasses import InitVar, dataclass
from typing import Any

from lockstep.config import actor_rollout_ref, critic, model
from lockstep.config.actor_rollout_ref import CheckpointEngineConfig, PolicyLossConfig, SamplingConfig
from lockstep.config.model import CheckpointConfig, FSDPEngineConfig, HFModelConfig
from lockstep.config.schema import Mismatch, coerce, keys
from lockstep.verl._config import resolve_by_hand

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "CriticConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "HFModelConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "RolloutConfig",
    "SamplingConfig",
]


def _take(section: Any, name: str, **older_names: Any) -> None:
    """Set the field `name` from an older name of it, which must not contradict it."""
    for older, value in older_names.items():
        if value is None:
            continue
        if getattr(section, name) not in (value, type(section).__dataclass_fields__[name].default):
            raise ValueError(f"{older}={value} and {name}={getattr(section, name)}: set only one of them")
        object.__setattr__(section, name, value)


@dataclass(frozen=True)
class ActorConfig(actor_rollout_ref.ActorConfig):
    ppo_micro_batch_size: InitVar[int | None] = None

    def __post_init__(self, ppo_micro_batch_size: int | None) -> None:
        _take(self, "ppo_micro_batch_size_per_gpu", ppo_micro_batch_size=ppo_micro_batch_size)
        resolve_by_hand(self, "actor_rollout_ref.actor")


@dataclass(frozen=True)
class RolloutConfig(actor_rollout_ref.RolloutConfig):
    log_prob_micro_batch_size: InitVar[int | None] = None

    def __post_init__(self, log_prob_micro_batch_size: int | None) -> None:
        _take(self, "log_prob_micro_batch_size_per_gpu", log_prob_micro_batch_size=log_prob_micro_batch_size)
        resolve_by_hand(self, "actor_rollout_ref.rollout")


@dataclass(frozen=True)
class CriticConfig(critic.CriticConfig):
    ppo_micro_batch_size: InitVar[int | None] = None
    forward_micro_batch_size: InitVar[int | None] = None

    def __post_init__(self, ppo_micro_batch_size: int | None, forward_micro_batch_size: int | None) -> None:
        _take(self, "ppo_micro_batch_size_per_gpu", ppo_micro_batch_size=ppo_micro_batch_size)
        _take(self, "forward_micro_batch_size_per_gpu", forward_micro_batch_size=forward_micro_batch_size)
        resolve_by_hand(self, "critic")


FSDPActorConfig, FSDPCriticConfig = ActorConfig, CriticConfig


@dataclass(frozen=True)
class FSDPOptimizerConfig(model.FSDPOptimizerConfig):
    """Checks its values, the name of the schedule among them."""

    warmup_style: InitVar[str | None] = None

    def __post_init__(self, warmup_style: str | None) -> None:
        _take(self, "lr_scheduler_type", warmup_style=warmup_style)
        for key in keys(model.FSDPOptimizerConfig).values():
            value = getattr(self, key.field)
            try:
                object.__setattr__(self, key.field, coerce(value, key.annotation))
            except Mismatch as error:
                raise ValueError(f"optim.{key.field}={value}: must be {error}") from None


OptimizerConfig = FSDPOptimizerConfig
