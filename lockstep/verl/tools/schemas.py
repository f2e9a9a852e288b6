"""verl.tools.schemas"""

from lockstep.agents.schemas import (
    OpenAIFunctionCallSchema as OpenAIFunctionCallSchema,
    OpenAIFunctionParametersSchema as OpenAIFunctionParametersSchema,
    OpenAIFunctionParsedSchema as OpenAIFunctionParsedSchema,
    OpenAIFunctionPropertySchema as OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema as OpenAIFunctionSchema,
    OpenAIFunctionToolCall as OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema as OpenAIFunctionToolSchema,
    ToolResponse as ToolResponse,
)
