"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from lockstep.agents.endpoint.answers import Answer, Session
from lockstep.agents.endpoint.chat import stop_strings
from lockstep.agents.endpoint.errors import ApiError, invalid
from lockstep.agents.endpoint.fields import (
    Body,
    Event,
    Items,
    ProtocolCall,
    allowed_tools,
    content_of,
    function_tool,
    json_arguments,
    new_id,
    text_of,
)
from lockstep.agents.renderer import Message


class MessageParam(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolParam(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class CountBody(Body):
    messages: list[MessageParam] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesBody(CountBody):
    only: ClassVar = {"mcp_servers": ([],), "output_format": (), "container": ()}

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None


class Messages(ProtocolCall):
    body: MessagesBody

    def __init__(self, data: Any, session: Session) -> None:
        self.body = body = MessagesBody.read(data)
        self.request = body.answer_request(
            max_tokens=body.max_tokens, stop=stop_strings(body.stop_sequences), tools=_tools(body)
        )
        self.prompts = [session.prompt_for(_messages(body), self.request.tools)]
        self._id = new_id("msg_")

    def document(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
        content += [_tool_use(call) | {"input": call["function"]["arguments"]} for call in answer.tool_calls]
        return self._message(content, answer)

    def _message(self, content: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": content,
            **(_ending(answer) if answer else {"stop_reason": None, "stop_sequence": None}),
            "usage": {
                "input_tokens": len(self.prompts[0].ids),
                "output_tokens": len(answer.token_ids) if answer else 0,
            },
        }

    async def events(self, items: Items) -> AsyncIterator[Event]:
        yield _event("message_start", message=self._message([], None))
        index = 0
        is_open = False
        async for _, item in items:
            if not isinstance(item, Answer):
                if item.text and not is_open:
                    is_open = True
                    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                if item.text:
                    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": item.text})
                continue
            if is_open:
                yield _event("content_block_stop", index=0)
                index = 1
            for number, call in enumerate(item.tool_calls, start=index):
                yield _event("content_block_start", index=number, content_block=_tool_use(call) | {"input": {}})
                delta = {"type": "input_json_delta", "partial_json": json_arguments(call)}
                yield _event("content_block_delta", index=number, delta=delta)
                yield _event("content_block_stop", index=number)
            yield _event("message_delta", delta=_ending(item), usage={"output_tokens": len(item.token_ids)})
            yield _event("message_stop")

    def error_event(self, error: ApiError) -> Event:
        return "error", error.anthropic()


def count_tokens(data: Any, session: Session) -> dict[str, Any]:
    """The response of `/v1/messages/count_tokens`."""
    body = CountBody.read(data)
    return {"input_tokens": len(session.prompt_for(_messages(body), _tools(body)).ids)}


def _tools(body: CountBody) -> tuple[dict[str, Any], ...]:
    tools = []
    for number, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise invalid(
                f"tools: {tool.name} has the type {tool.type!r}; only tools of the client are supported", "tools"
            )
        place = f"tools.{number}.input_schema"
        tools.append(function_tool(tool.name, tool.description, tool.input_schema, place))
    choice = body.tool_choice or {}
    if choice.get("disable_parallel_tool_use"):
        raise invalid("tool_choice.disable_parallel_tool_use cannot be enforced; leave it out", "tool_choice")
    return allowed_tools(tools, choice or None)


def _messages(body: CountBody) -> list[Message]:
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system, "system")})
    for number, message in enumerate(body.messages):
        place = f"messages.{number}.content"
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            messages.append(_assistant(blocks, place))
        else:
            messages.extend(_user(message.role, blocks, place))
    return messages


def _assistant(blocks: list[dict[str, Any]], place: str) -> Message:
    """Reasoning is not shown to the model again: answers of this server have it in their text."""
    calls = []
    for block in blocks:
        if block.get("type") != "tool_use":
            continue
        name, arguments = block.get("name"), block.get("input", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise invalid(f"{place}: a tool_use needs a name, which is text, and an object as input", place)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
    text = [block for block in blocks if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    return {"role": "assistant", "content": text_of(text, place), **({"tool_calls": calls} if calls else {})}


def _user(role: str, blocks: list[dict[str, Any]], place: str) -> list[Message]:
    """Results of tools are separate messages, before the rest."""
    results = [
        {
            "role": "tool",
            "content": content_of(block.get("content"), place),
            "tool_call_id": str(block.get("tool_use_id", "")),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    return [*results, *([{"role": role, "content": content_of(rest, place)}] if rest else [])]


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _ending(answer: Answer) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if answer.stop_string and not answer.tool_calls else reasons[answer.finish]
    return {"stop_reason": reason, "stop_sequence": answer.stop_string if reason == "stop_sequence" else None}


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}
