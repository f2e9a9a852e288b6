"""verl.tools.gsm8k_tool"""

from lockstep.agents.tools.gsm8k import Gsm8kTool

__all__ = ["Gsm8kTool"]
