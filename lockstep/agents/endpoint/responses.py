"""OpenAI's `/v1/responses`."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from lockstep.agents.endpoint.answers import Answer, Session
from lockstep.agents.endpoint.errors import ApiError, invalid
from lockstep.agents.endpoint.fields import (
    Body,
    Event,
    Items,
    ProtocolCall,
    allowed_tools,
    arguments_of,
    content_of,
    function_tool,
    json_arguments,
    new_id,
    now,
)
from lockstep.agents.renderer import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ResponseTool(BaseModel):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesBody(Body):
    only: ClassVar = {
        "text": ({"format": {"type": "text"}}, {}),
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "parallel_tool_calls": (True,),
        "top_logprobs": (0,),
        "max_tool_calls": (),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None


class Responses(ProtocolCall):
    body: ResponsesBody

    def __init__(self, data: Any, session: Session) -> None:
        self.body = body = ResponsesBody.read(data)
        self._session = session
        if wrong := [tool.type for tool in body.tools or () if tool.type != "function"]:
            raise invalid(f"tools: only tools of type 'function' are supported, not {wrong[0]!r}", "tools")
        tools = [
            function_tool(tool.name, tool.description, tool.parameters, f"tools.{i}.parameters")
            for i, tool in enumerate(body.tools or ())
        ]
        self.request = body.answer_request(
            max_tokens=body.max_output_tokens, tools=allowed_tools(tools, body.tool_choice)
        )
        self._messages = [*self._previous(), *_messages(body.input)]
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        self.prompts = [session.prompt_for([*system, *self._messages], self.request.tools)]
        self._id, self._created, self._message_id = new_id("resp_"), now(), new_id("msg_")

    def _previous(self) -> list[Message]:
        """The conversation that the request continues; instructions are not carried over."""
        before = self.body.previous_response_id
        if before is None:
            return []
        if before not in self._session.responses:
            raise ApiError(
                400,
                f"no response {before!r} in this session (responses are kept only at the URL of a session, /s/NAME/v1)",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._session.responses[before]

    def document(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self._session.responses[self._id] = [*self._messages, answer.message]
        output = [self._text_item(answer.text)] if answer.text or not answer.tool_calls else []
        return self._response([*output, *(_call_item(call) for call in answer.tool_calls)], answer)

    def _response(self, output: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
        is_cut = answer is not None and answer.finish == "length"
        body = self.body
        response = {"id": self._id, "object": "response", "created_at": self._created}
        return response | {
            "status": "in_progress" if answer is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() | {"strict": False} for tool in body.tools or ()],
            "top_p": body.top_p,
            "usage": None if answer is None else _usage(answer),
        }

    def _text_item(self, text: str | None, status: str = "completed") -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content}

    async def events(self, items: Items) -> AsyncIterator[Event]:
        number = 0
        async for kind, data in self._events(items):
            yield kind, {"type": kind, "sequence_number": number, **data}
            number += 1

    async def _events(self, items: Items) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        yield "response.created", {"response": self._response([], None)}
        yield "response.in_progress", {"response": self._response([], None)}
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        is_open = False
        async for _, item in items:
            # an answer without text and calls is an empty message
            has_text = not item.tool_calls if isinstance(item, Answer) else bool(item.text)
            if has_text and not is_open:
                is_open = True
                opening = self._text_item(None, "in_progress")
                yield "response.output_item.added", {"output_index": 0, "item": opening}
                yield "response.content_part.added", {**place, "part": _part("")}
            if not isinstance(item, Answer):
                if has_text:
                    yield "response.output_text.delta", {**place, "delta": item.text, "logprobs": []}
                continue
            if is_open:
                yield "response.output_text.done", {**place, "text": item.text, "logprobs": []}
                yield "response.content_part.done", {**place, "part": _part(item.text)}
                yield "response.output_item.done", {"output_index": 0, "item": self._text_item(item.text)}
            response = self.document([item])
            for index, output in enumerate(response["output"]):
                if output["type"] == "function_call":
                    async for event in _call_events(output, index):
                        yield event
            yield f"response.{response['status']}", {"response": response}

    def error_event(self, error: ApiError) -> Event:
        return "error", {"type": "error", "sequence_number": 0, **error.openai()["error"]}


async def _call_events(item: dict[str, Any], index: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    place = {"item_id": item["id"], "output_index": index}
    opening = item | {"arguments": "", "status": "in_progress"}
    yield "response.output_item.added", {"output_index": index, "item": opening}
    yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
    yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": item["arguments"]}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call['id']}",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": json_arguments(call),
        "status": "completed",
    }


def _usage(answer: Answer) -> dict[str, Any]:
    inputs, outputs = len(answer.prompt_ids), len(answer.token_ids)
    return {
        "input_tokens": inputs,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": outputs,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": inputs + outputs,
    }


def _messages(items: str | list[dict[str, Any]]) -> list[Message]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for number, item in enumerate(items):
        place = f"input.{number}"
        kind = item.get("type", "message")
        if kind == "message":
            if item.get("role") not in list(ROLES):
                raise invalid(f"{place}.role: must be one of {', '.join(ROLES)}", place)
            messages.append({"role": ROLES[item["role"]], "content": content_of(item.get("content"), place)})
        elif kind == "function_call":
            _add_call(messages, item, place)
        elif kind == "function_call_output":
            output = item.get("output")
            text = content_of(output, place) if isinstance(output, str | list) else json.dumps(output)
            messages.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))})
        elif kind != "reasoning":  # which answers of this server have in their text
            raise invalid(f"{place}: items of type {kind!r} are not supported", place)
    return messages


def _add_call(messages: list[Message], item: dict[str, Any], place: str) -> None:
    """A call belongs to the assistant's message before it."""
    if not isinstance(item.get("name"), str):
        raise invalid(f"{place}.name: a call needs the name of a function", place)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": arguments_of(item.get("arguments"), place)}
    call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
    messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}
