"""verl.interactions.gsm8k_interaction"""

from lockstep.agents.interactions.gsm8k import Gsm8kInteraction

__all__ = ["Gsm8kInteraction"]
