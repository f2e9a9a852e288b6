"""Tools that the policy can call; the built-in ones register here."""

from lockstep.agents.tools.calculator import CalculatorTool as CalculatorTool
from lockstep.agents.tools.gsm8k import Gsm8kTool as Gsm8kTool
from lockstep.agents.tools.mcp import McpTool as McpTool
from lockstep.agents.tools.python import PythonTool as PythonTool
from lockstep.agents.tools.sandbox_fusion import SandboxFusionTool as SandboxFusionTool
from lockstep.agents.tools.search import SearchTool as SearchTool
from lockstep.agents.tools.tool import TOOLS as TOOLS, BaseTool as BaseTool
