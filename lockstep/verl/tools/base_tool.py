"""verl.tools.base_tool"""

from lockstep.agents.tools.tool import BaseTool as BaseTool
