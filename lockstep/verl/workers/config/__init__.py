"""verl.workers.config: sections that a program may construct itself, with every default filled in."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class ActorConfig(actor_rollout_ref.ActorConfig):
    def __post_init__(self) -> None:
        resolve_by_hand(self, "actor_rollout_ref.actor")


@dataclass(frozen=True)
class RolloutConfig(actor_rollout_ref.RolloutConfig):
    def __post_init__(self) -> None:
        resolve_by_hand(self, "actor_rollout_ref.rollout")


@dataclass(frozen=True)
class CriticConfig(critic.CriticConfig):
    def __post_init__(self) -> None:
        resolve_by_hand(self, "critic")


FSDPActorConfig, FSDPCriticConfig = ActorConfig, CriticConfig


@dataclass(frozen=True)
class FSDPOptimizerConfig(model.FSDPOptimizerConfig):
    """Checks its values, the name of the schedule among them."""

    def __post_init__(self) -> None:
        for key in keys(model.FSDPOptimizerConfig).values():
            value = getattr(self, key.field)
            try:
                object.__setattr__(self, key.field, coerce(value, key.annotation))
            except Mismatch as error:
                raise ValueError(f"optim.{key.field}={value}: must be {error}") from None


OptimizerConfig = FSDPOptimizerConfig
