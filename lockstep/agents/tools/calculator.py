"""The calculator tool: evaluates an arithmetic expression."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.agents.tools.tool import TOOLS, BaseTool, Executed, tool_schema

MAX_CHARS = 200
MAX_DIGITS = 100
"""Largest result, as a power of ten."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, parentheses and + - * / // % **; ValueError for anything else."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _checked(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        # before the power is computed: 9**9**9 would take all memory
        if isinstance(node.op, ast.Pow) and left and abs(right) * math.log10(max(abs(left), 1.0)) > MAX_DIGITS:
            raise ValueError("the result is too large")
        return _checked(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, parentheses and + - * / // % ** are allowed")


def _checked(value: Any) -> int | float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("the result is not a finite real number")
    if abs(value) > 10**MAX_DIGITS:
        raise ValueError("the result is too large")
    return value


@TOOLS.register("calculator")
class CalculatorTool(BaseTool):
    """Arithmetic on one expression."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        expression = {"type": "string", "description": "For example (3+4)*12."}
        return tool_schema("calculator", "Evaluate an arithmetic expression.", expression=expression)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        return ToolResponse(text=calculate(str(parameters["expression"]))), None, {}
