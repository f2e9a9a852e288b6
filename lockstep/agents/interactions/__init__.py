"""Interactions: simulated users; the built-in ones register here."""

from lockstep.agents.interactions.base import INTERACTIONS, BaseInteraction
from lockstep.agents.interactions.gsm8k import Gsm8kInteraction

__all__ = ["INTERACTIONS", "BaseInteraction", "Gsm8kInteraction"]
