"""verl.interactions.base"""

from lockstep.agents.interactions.interaction import BaseInteraction

__all__ = ["BaseInteraction"]
