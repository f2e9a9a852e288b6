"""A real MCP server with tools that answer, fail, hang and end the server; as a program it speaks on stdin and stdout."""

import asyncio
import os
import subprocess

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools", log_level="ERROR")
num_calls = 0


@server.tool()
def add(a: int, b: int, note: str | None = None) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """How often this process was asked."""
    global num_calls
    num_calls += 1
    return f"{num_calls} of {os.getpid()}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such city")


@server.tool()
async def hang() -> str:
    """Never answer."""
    await asyncio.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def leave_a_child() -> str:
    """Start a process that would outlive the server."""
    return str(subprocess.Popen(["sleep", "600"]).pid)


if __name__ == "__main__":
    server.run()
