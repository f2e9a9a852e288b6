"""verl.tools.base_tool"""

from lockstep.agents.tools.base import BaseTool

__all__ = ["BaseTool"]
