"""verl.tools.base_tool"""

from lockstep.agents.tools.tool import BaseTool

__all__ = ["BaseTool"]
