"""verl.tools.search_tool"""

from lockstep.agents.tools.search import SearchTool as SearchTool
