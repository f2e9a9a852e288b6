"""verl.tools.mcp_search_tool"""

from lockstep.agents.tools.mcp import McpTool as MCPSearchTool

__all__ = ["MCPSearchTool"]
