"""Adapters for environments of other packages; the loops register here. Their packages are imported when a row needs them."""

from lockstep.agents.environments.environment import EnvironmentLoop, Episode, Step
from lockstep.agents.environments.gym import GymAgent
from lockstep.agents.environments.openenv import OpenEnvAgent
from lockstep.agents.environments.verifiers import VerifiersAgent

__all__ = ["EnvironmentLoop", "Episode", "GymAgent", "OpenEnvAgent", "Step", "VerifiersAgent"]
