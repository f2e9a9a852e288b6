"""Tools that the policy can call; the built-in ones register here."""

from lockstep.agents.tools.calculator import CalculatorTool
from lockstep.agents.tools.gsm8k import Gsm8kTool
from lockstep.agents.tools.mcp import McpTool
from lockstep.agents.tools.python import PythonTool
from lockstep.agents.tools.sandbox_fusion import SandboxFusionTool
from lockstep.agents.tools.search import SearchTool
from lockstep.agents.tools.tool import TOOLS, BaseTool

__all__ = [
    "TOOLS",
    "BaseTool",
    "CalculatorTool",
    "Gsm8kTool",
    "McpTool",
    "PythonTool",
    "SandboxFusionTool",
    "SearchTool",
]
