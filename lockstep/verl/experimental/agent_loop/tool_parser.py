"""verl.experimental.agent_loop.tool_parser"""

from lockstep.agents.tool_parser import FunctionCall, GptOssToolParser, HermesToolParser, ToolParser

__all__ = ["FunctionCall", "GptOssToolParser", "HermesToolParser", "ToolParser"]
