"""OpenAI's `/v1/chat/completions`."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from lockstep.agents.endpoint.answers import Answer, Session
from lockstep.agents.endpoint.errors import invalid
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

MAX_STOPS = 64
MAX_STOP_CHARS = 1000


class Function(BaseModel):
    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ToolFunction(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatBody(Body):
    only: ClassVar = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "functions": ([],),
        "parallel_tool_calls": (True,),
        "top_logprobs": (0,),
        "modalities": (["text"],),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class ChatCompletions(ProtocolCall):
    body: ChatBody

    def __init__(self, data: Any, session: Session) -> None:
        self.body = body = ChatBody.read(data)
        tools = [
            function_tool(
                tool.function.name,
                tool.function.description,
                tool.function.parameters,
                f"tools.{i}.function.parameters",
            )
            for i, tool in enumerate(body.tools or ())
        ]
        self.request = body.answer_request(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            stop=stop_strings(body.stop),
            n=body.n,
            tools=allowed_tools(tools, body.tool_choice),
        )
        messages = [_message(message, f"messages.{i}") for i, message in enumerate(body.messages)]
        self.prompts = [session.prompt_for(messages, self.request.tools)]
        self._head = {"id": new_id("chatcmpl-"), "created": now(), "model": body.model}
        self._decode = session.recorder.renderer.tokenizer.decode

    def document(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(number, answer) for number, answer in enumerate(answers)]
        ids = {"prompt_token_ids": answers[0].prompt_ids} if self.body.return_token_ids else {}
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(answers, 1), **ids}

    def _choice(self, number: int, answer: Answer) -> dict[str, Any]:
        content = answer.text or (None if answer.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.tool_calls:
            message["tool_calls"] = [_call(call) for call in answer.tool_calls]
        return {
            "index": number,
            "message": message,
            "finish_reason": answer.finish,
            "logprobs": self._logprobs(answer.token_ids, answer.log_probs),
            **({"token_ids": answer.token_ids} if self.body.return_token_ids else {}),
        }

    def _logprobs(self, token_ids: list[int], log_probs: list[float]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        texts = [self._decode([token]) for token in token_ids]
        content = [
            {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, log_prob in zip(texts, log_probs)
        ]
        return {"content": content, "refusal": None}

    async def events(self, items: Items) -> AsyncIterator[Event]:
        for number in range(self.body.n):
            yield self._chunk(number, {"role": "assistant", "content": ""})
        answers = []
        async for number, item in items:
            if not isinstance(item, Answer):
                more: dict[str, Any] = {"logprobs": self._logprobs(item.token_ids, item.log_probs)}
                if self.body.return_token_ids:
                    more["token_ids"] = item.token_ids
                yield self._chunk(number, {"content": item.text}, **more)
                continue
            answers.append(item)
            if item.tool_calls:
                calls = [{"index": i, **_call(call)} for i, call in enumerate(item.tool_calls)]
                yield self._chunk(number, {"tool_calls": calls})
            yield self._chunk(number, {}, finish_reason=item.finish)
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield None, {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(answers, 1)}
        yield None, "[DONE]"

    def _chunk(self, number: int, delta: dict[str, Any], **more: Any) -> Event:
        choice = {"index": number, "delta": delta, "finish_reason": None, **more}
        return None, {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


def _message(message: ChatMessage, place: str) -> Message:
    role = "system" if message.role == "developer" else message.role
    plain: Message = {"role": role, "content": content_of(message.content, f"{place}.content")}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments, place)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": json_arguments(call)}
    return {"id": call["id"], "type": "function", "function": function}


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise invalid("stop: a stop string must not be empty", "stop")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise invalid(f"stop: at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters are allowed", "stop")
    return stops


def usage(answers: Sequence[Answer], num_prompts: int) -> dict[str, Any]:
    """Prompts are counted once, whatever n is."""
    per_prompt = max(1, len(answers) // num_prompts)
    prompt = sum(len(answer.prompt_ids) for answer in answers[::per_prompt])
    completion = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
