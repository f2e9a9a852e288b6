"""verl.interactions.base"""

from lockstep.agents.interactions.base import BaseInteraction

__all__ = ["BaseInteraction"]
