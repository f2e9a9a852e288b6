"""Interactions: simulated users; the built-in ones register here."""

from lockstep.agents.interactions.gsm8k import Gsm8kInteraction as Gsm8kInteraction
from lockstep.agents.interactions.interaction import INTERACTIONS as INTERACTIONS, BaseInteraction as BaseInteraction
from lockstep.agents.interactions.simulated_user import SimulatedUser as SimulatedUser
