"""Rollout engines: prompts to responses with log-probs, by the name in `actor_rollout_ref.rollout.name` (`config/engines.py`)."""

from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.engines.rollout.rollout_engine import RolloutEngine, create_rollout_engine
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams

__all__ = [
    "ROLLOUT_ENGINES",
    "Completion",
    "GenerationRequest",
    "RolloutEngine",
    "SamplingParams",
    "create_rollout_engine",
]
