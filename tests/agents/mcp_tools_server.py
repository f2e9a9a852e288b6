"""A real MCP server with tools that answer, fail, hang and end the server: stdio, or loopback HTTP on a free port.

python mcp_tools_server.py [http|sse READY_FILE]
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

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
def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def leave_a_child() -> str:
    """Start a process that would outlive the server."""
    return str(subprocess.Popen(["sleep", "600"]).pid)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    else:
        port = int(sys.argv[3]) if len(sys.argv) > 3 else free_port()
        Path(sys.argv[2]).write_text(str(port))
        server.run("sse" if sys.argv[1] == "sse" else "streamable-http", port=port)
