"""verl.experimental.agent_loop.tool_parser"""

from lockstep.agents.tool_parser import (
    FunctionCall as FunctionCall,
    GptOssToolParser as GptOssToolParser,
    HermesToolParser as HermesToolParser,
    ToolParser as ToolParser,
)
