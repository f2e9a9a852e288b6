"""An MCP server on stdin and stdout."""

from mcp.server.mcpserver import MCPServer

from tests.hangs.plants import hang_here, is_now

server = MCPServer("library", log_level="ERROR")


@server.tool()
def look_up(x: int) -> int:
    """Look a number up."""
    if is_now("mcp"):
        hang_here()
    return 2 * x


if __name__ == "__main__":
    server.run()
