"""Training engines, by the name in `actor_rollout_ref.actor.strategy` (`config/engines.py`)."""

from lockstep.config.engines import TRAIN_ENGINES
from lockstep.engines.train.train_engine import EngineModel, LossFn, MicroBatching, TrainEngine, create_train_engine

__all__ = [
    "TRAIN_ENGINES",
    "EngineModel",
    "LossFn",
    "MicroBatching",
    "TrainEngine",
    "create_train_engine",
]
