"""Tool schemas: validation, round trips and error messages."""

from typing import Any

import pytest

from lockstep.agents.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string", "description": "what"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["q"],
        },
    },
}


def test_tool_schema_round_trip() -> None:
    tool = OpenAIFunctionToolSchema.model_validate(TOOL)
    assert tool.function.parameters.properties["q"].description == "what"
    assert tool.model_dump(exclude_unset=True, exclude_none=True) == TOOL
    whole = tool.model_dump()["function"]
    assert whole["strict"] is False and whole["parameters"]["properties"]["q"]["enum"] is None
    assert OpenAIFunctionToolSchema.model_validate(tool) is tool
    bare = {"type": "function", "function": {"name": "stop", "description": ""}}
    assert OpenAIFunctionToolSchema.model_validate(bare).function.parameters.properties == {}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "function"}, r"OpenAIFunctionToolSchema has no 'function' \(fields: type\)"),
        ({"type": "function", "function": {"name": "f"}}, "OpenAIFunctionSchema has no 'description'"),
        ({"type": "function", "function": {"name": 3, "description": ""}}, "`name` must be text, not 3"),
        ({"type": "function", "function": []}, "OpenAIFunctionSchema must be built from a mapping, not list"),
    ],
)
def test_bad_tools_are_rejected(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenAIFunctionToolSchema.model_validate(data)


def test_required_parameter_must_exist() -> None:
    parameters = TOOL["function"]["parameters"] | {"required": ["query"]}
    with pytest.raises(ValueError, match=r"`required` has \['query'\], which `properties` does not have"):
        OpenAIFunctionToolSchema.model_validate({**TOOL, "function": TOOL["function"] | {"parameters": parameters}})


def test_calls() -> None:
    def read(arguments: str) -> tuple[dict[str, Any], bool]:
        parsed = OpenAIFunctionParsedSchema(name="f", arguments=arguments)
        call, failed = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
        return call.arguments, failed

    assert read('{"a": 1}') == ({"a": 1}, False)
    assert read("{a") == ({}, True) and read("[1]") == ({}, True)
    call = OpenAIFunctionToolCall.model_validate({"id": "1", "function": {"name": "f", "arguments": {"a": 1}}})
    assert call.model_dump() == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def test_tool_responses() -> None:
    assert ToolResponse().is_empty() and ToolResponse(text="").is_empty()
    assert ToolResponse(text="x").is_text_only() and not ToolResponse(text="x", image=[1]).is_text_only()
    with pytest.raises(ValueError, match=r"ToolResponse\.image must be a list of images, not str; write \[image\]"):
        ToolResponse(image="a.png")  # type: ignore[arg-type]
