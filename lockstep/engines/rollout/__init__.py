"""Rollout engines: prompts to responses with log-probs, by the name in `actor_rollout_ref.rollout.name`."""

from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.hf import HFEngine
from lockstep.engines.rollout.rollout_engine import (
    ROLLOUT_ENGINES,
    RolloutEngine,
    create_rollout_engine,
)
from lockstep.engines.rollout.server.engine import ServerEngine
from lockstep.engines.rollout.vllm import VllmEngine
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams

__all__ = [
    "ROLLOUT_ENGINES",
    "Completion",
    "EmbeddedEngine",
    "GenerationRequest",
    "HFEngine",
    "RolloutEngine",
    "SamplingParams",
    "ServerEngine",
    "VllmEngine",
    "create_rollout_engine",
]
