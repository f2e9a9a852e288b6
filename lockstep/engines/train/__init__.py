"""Training engines, by the name in `actor_rollout_ref.actor.strategy`."""

from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import (
    TRAIN_ENGINES,
    EngineModel,
    LossFn,
    MicroBatching,
    TrainEngine,
    create_train_engine,
)

__all__ = [
    "TRAIN_ENGINES",
    "EngineModel",
    "FsdpEngine",
    "LossFn",
    "MicroBatching",
    "TrainEngine",
    "create_train_engine",
]
