"""verl.tools.mcp_base_tool"""

from lockstep.agents.tools.mcp import McpTool as MCPBaseTool

__all__ = ["MCPBaseTool"]
