"""Loads tools: from the YAML of `multi_turn.tool_config_path`, and from Python of `multi_turn.function_tool_path`.

tools:
  - class_name: calculator                       registered, or module.Class, module:Class, file.py:Class
    config: {type: native}
    tool_schema: {type: function, function: {name: ..., description: ..., parameters: ...}}     optional
"""

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.agents.schemas import OpenAIFunctionToolSchema
from lockstep.agents.tools.calls import by_name
from lockstep.agents.tools.function import FunctionTool, tools_of
from lockstep.agents.tools.mcp import McpTool, load_mcp_tools
from lockstep.agents.tools.tool import TOOLS, BaseTool
from lockstep.registry import load_module, load_object, load_plugin

TOOL_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
FUNCTION_KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"

VERL_TOOLS = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "gsm8k",
    "verl.tools.search_tool.SearchTool": "search",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "sandbox_fusion",
    "recipe.retool.retool.CustomSandboxFusionTool": "sandbox_fusion",
    "verl.tools.mcp_base_tool.MCPBaseTool": "mcp",
    "verl.tools.mcp_search_tool.MCPSearchTool": "mcp",
}
"""verl's classes that have a counterpart here."""


def load_tools(config_path: str | None, function_path: str | None) -> dict[str, BaseTool]:
    """The tools of both keys by name; ValueError with the key if something in them is wrong."""
    tools: list[BaseTool] = []
    try:
        for number, entry in enumerate([] if config_path is None else read_entries(TOOL_KEY, config_path, "tools")):
            tools += _tools_of(f"{TOOL_KEY}={config_path}, tools[{number}]", entry)
        tools += [] if function_path is None else _from_python(function_path)
        return by_name(tools)
    except ValueError:
        close_tools(tools)
        raise


def close_tools(tools: Iterable[BaseTool]) -> None:
    for tool in tools:
        tool.close()


def read_entries(key: str, path: str, section: str) -> list[Mapping[str, Any]]:
    """The list under `section` of a YAML file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}={path}: no such file")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{key}={path}: not valid YAML: {' '.join(str(error).split())}") from error
    entries = content.get(section) if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"{key}={path}: must have a list `{section}` of objects")
    return entries


def _tools_of(where: str, entry: Mapping[str, Any]) -> list[BaseTool]:
    """One tool, or those of the entry's MCP servers."""
    config = entry.get("config") or {}
    cls = find_class(where, entry.get("class_name"), TOOLS, BaseTool, VERL_TOOLS)
    is_mcp = issubclass(cls, McpTool)
    if (kind := config.get("type", "mcp" if is_mcp else "native")) != ("mcp" if is_mcp else "native"):
        raise ValueError(
            f"{where}: config.type={kind} does not fit class_name={entry['class_name']}; allowed: native, or mcp with McpTool"
        )
    schema = entry.get("tool_schema")
    try:
        if is_mcp:
            return load_mcp_tools(cls, entry)
        return [cls(config, OpenAIFunctionToolSchema.model_validate(schema) if schema else None)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def find_class(where: str, name: Any, registry: Any, base: type, verl: Mapping[str, str]) -> Any:
    """The class of a YAML entry: a registered name, `module.Class`, `module:Class` or `file.py:Class`."""
    if not isinstance(name, str):
        raise ValueError(f"{where}: class_name must be text, not {name!r}")
    name = verl.get(name, name)
    if name in registry:
        return registry.get(name)
    if ":" not in name and "." not in name:
        raise ValueError(f"{where}: {registry.explain_unknown(name)}")
    reference = name if ":" in name else ":".join(name.rsplit(".", 1))
    return load_plugin(f"{where}: class_name", reference, base=base)


def _from_python(reference: str) -> list[BaseTool]:
    """All public functions of a file or module, or the function or class after the colon."""
    try:
        if ":" in reference:
            return tools_of(load_object(reference))
        module = load_module(reference)
        functions = [
            item
            for name, item in vars(module).items()
            if inspect.isfunction(item) and item.__module__ == module.__name__ and not name.startswith("_")
        ]
        if not functions:
            raise ValueError("it defines no public functions")
        return [FunctionTool(function) for function in functions]
    except ValueError as error:
        raise ValueError(f"{FUNCTION_KEY}={reference}: {error}") from error
