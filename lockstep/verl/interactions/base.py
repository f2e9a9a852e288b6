"""verl.interactions.base"""

from lockstep.agents.interactions.interaction import BaseInteraction as BaseInteraction
