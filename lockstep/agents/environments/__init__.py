"""Adapters for environments of other packages; the loops register here. Their packages are imported when a row needs them."""

from lockstep.agents.environments.environment import (
    EnvironmentLoop as EnvironmentLoop,
    Episode as Episode,
    Step as Step,
)
from lockstep.agents.environments.gym import GymAgent as GymAgent
from lockstep.agents.environments.openenv import OpenEnvAgent as OpenEnvAgent
from lockstep.agents.environments.verifiers import VerifiersAgent as VerifiersAgent
