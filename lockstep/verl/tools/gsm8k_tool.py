"""verl.tools.gsm8k_tool"""

from lockstep.agents.tools.gsm8k import Gsm8kTool as Gsm8kTool
