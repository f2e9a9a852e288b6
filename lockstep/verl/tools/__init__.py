"""verl.tools: the base class and the schemas of tools."""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.tools.schemas": ("OpenAIFunctionToolSchema", "ToolResponse"),
        "lockstep.verl.tools.base_tool": ("BaseTool",),
    },
)
