"""Tools of MCP servers, from entries of the tool config with `type: mcp`.

tools:
  - class_name: mcp
    config: {type: mcp, timeout: 20, rate_limit: 50}
    mcp:
      mcp_servers_config_path: servers.json        {"mcpServers": {"name": {"command": "uvx", "args": [...]} or {"url": ...}}}
      servers: {}                                  the same inline
      tool_selected_list: [search]                 optional; all tools by default
"""

import json
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.agents.tools.calls import ToolError
from lockstep.agents.tools.mcp_server import McpServer
from lockstep.agents.tools.tool import TOOLS, BaseTool, Executed

if TYPE_CHECKING:
    from mcp import Tool
    from mcp.types import CallToolResult

logger = logging.getLogger(__name__)

CONFIG = ("timeout", "rate_limit", "connect_timeout", "type")
SECTION = ("mcp_servers_config_path", "servers", "tool_selected_list")


@TOOLS.register("mcp")
class McpTool(BaseTool):
    """One tool of an MCP server; the schema is the server's.

    config: `timeout` of a call in seconds (multi_turn.tool_timeout_s also applies), `rate_limit` in calls per second and server,
    `connect_timeout` (30) in seconds.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema, server: McpServer) -> None:
        super().__init__(config, tool_schema)
        self.server = server
        self.timeout_s = None if config.get("timeout") is None else float(config["timeout"])

    @property
    def label(self) -> str:
        return f"{self.name} of {self.server}"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        result = await self.server.call(self.name, parameters, self.timeout_s)
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        return ToolResponse(text=text), None, {}

    def close(self) -> None:
        self.server.close()


def load_mcp_tools(cls: type[McpTool], entry: Mapping[str, Any]) -> list[BaseTool]:
    """The tools of an entry's servers, all of them or the selected ones; ValueError if a server cannot be reached."""
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("MCP tools need the package mcp: pip install 'lockstep-rl[mcp]'") from error
    config, section = dict(entry.get("config") or {}), dict(entry.get("mcp") or {})
    for name, values, known in (("config", config, CONFIG), ("mcp", section, SECTION)):
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"{name} has no setting {', '.join(unknown)}; known: {', '.join(known)}")
    for name in ("timeout", "rate_limit", "connect_timeout"):
        if config.get(name) is not None and float(config[name]) <= 0:
            raise ValueError(f"config.{name}={config[name]}: must be above 0")
    with ExitStack() as on_error:
        offered: list[tuple[Tool, McpServer]] = []
        for name, settings in _servers_of(section).items():
            server = McpServer(
                name,
                settings,
                connect_timeout_s=float(config.get("connect_timeout", 30.0)),
                calls_per_s=float(config.get("rate_limit", math.inf)),
            )
            on_error.callback(server.close)
            listed = server.list_tools()
            logger.info("MCP server %s: %s", name, ", ".join(tool.name for tool in listed) or "no tools")
            offered += [(tool, server) for tool in listed]
        names = [tool.name for tool, _ in offered]
        selected = section.get("tool_selected_list") or names
        if missing := [name for name in selected if name not in names]:
            raise ValueError(
                f"mcp.tool_selected_list: no server offers {', '.join(missing)}; offered: {', '.join(names)}"
            )
        if twice := sorted({name for name in selected if names.count(name) > 1}):
            raise ValueError(
                f"several MCP servers offer {', '.join(twice)}; set mcp.tool_selected_list, in one entry per server"
            )
        tools: list[BaseTool] = [
            cls(config, _schema_of(tool), server) for tool, server in offered if tool.name in selected
        ]
        on_error.pop_all()
    return tools


def _servers_of(section: Mapping[str, Any]) -> dict[str, Any]:
    servers = dict(section.get("servers") or {})
    path = section.get("mcp_servers_config_path")
    if path is not None:
        try:
            content = json.loads(Path(path).expanduser().read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"mcp.mcp_servers_config_path={path}: {error}") from error
        listed = content.get("mcpServers") if isinstance(content, Mapping) else None
        if not isinstance(listed, Mapping):
            raise ValueError(f"mcp.mcp_servers_config_path={path}: must have an object `mcpServers`")
        servers |= listed
    if not servers:
        raise ValueError("mcp names no servers: set mcp.mcp_servers_config_path or mcp.servers")
    return servers


def _schema_of(tool: "Tool") -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": {}, "required": [], **tool.input_schema}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    try:
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    except ValueError as error:
        raise ValueError(f"the schema of the MCP tool {tool.name!r} cannot be used: {error}") from error


def _text_of(result: "CallToolResult") -> str:
    others = sorted({block.type for block in result.content if block.type != "text"})
    if others:
        raise ToolError(f"the tool returned {', '.join(others)}; only text is supported")
    texts = [block.text for block in result.content if block.type == "text"]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)
