"""verl.tools.utils.tool_registry"""

from pathlib import Path

from lockstep.agents.tools.load import load_tools
from lockstep.agents.tools.tool import BaseTool


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """The tools of a YAML file; FileNotFoundError without the file."""
    if not Path(tools_config_file).expanduser().is_file():
        raise FileNotFoundError(f"no file {tools_config_file}")
    return list(load_tools(tools_config_file, None).values())
