"""verl.tools.search_tool"""

from lockstep.agents.tools.search import SearchTool

__all__ = ["SearchTool"]
