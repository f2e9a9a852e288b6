"""Interactions: simulated users; the built-in ones register here."""

from lockstep.agents.interactions.gsm8k import Gsm8kInteraction
from lockstep.agents.interactions.interaction import INTERACTIONS, BaseInteraction
from lockstep.agents.interactions.simulated_user import SimulatedUser

__all__ = ["INTERACTIONS", "BaseInteraction", "Gsm8kInteraction", "SimulatedUser"]
