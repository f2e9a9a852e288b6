"""Answers to one prompt: sampling, stop strings, tool calls, streaming in pieces, recording.

    prompt ─► generate(piece) ─► tokens so far ─► text ─► Delta, Delta, ...  ─► Answer
                 ▲                    │
                 └── until a stop token, a stop string or max_tokens

Engines return whole completions. An answer that is streamed, or that a stop string may end, is generated in pieces, which gives the
same tokens: a token depends only on its logits, the seed and its position.
"""

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lockstep.agents.conversation import Generate
from lockstep.agents.endpoint.errors import ApiError
from lockstep.agents.endpoint.recorder import Prompt, SessionRecorder
from lockstep.agents.renderer import Message, TooLongError
from lockstep.agents.schemas import OpenAIFunctionToolSchema, arguments_object
from lockstep.agents.tool_parser import FunctionCall, ToolParser
from lockstep.data.images import ImageError
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams, first_routes

FIRST_PIECE, LARGEST_PIECE = 16, 128
"""Tokens of the first piece; each further one is twice as long, up to the largest, because each one prefills the prompt again."""


@dataclass(frozen=True)
class AnswerRequest:
    """What a client asked for, in any protocol; None is the rollout's value.

    max_tokens: cut to the room that the prompt leaves in the model's context.
    stop:       texts that end the answer, and are not part of it.
    tools:      in OpenAI's form.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    tools: tuple[dict[str, Any], ...] = ()
    stream: bool = False


@dataclass(frozen=True)
class Delta:
    """The next part of an answer; its last tokens may belong to text that comes with the next part."""

    text: str
    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Answer:
    """A complete answer.

    text:         without stop token, stop string and tool calls.
    tool_calls:   as in a Message.
    finish:       why it ended.
    stop_string:  the one that ended it.
    """

    text: str
    tool_calls: list[dict[str, Any]]
    finish: Literal["stop", "length", "tool_calls"]
    stop_string: str | None
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]

    @property
    def message(self) -> Message:
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}


@dataclass(frozen=True)
class AnswerSettings:
    """sampling:      the rollout's; its `max_tokens` is that of requests without one.
    max_model_len:    most tokens of prompt and answer.
    max_response_len: most tokens after the first prompt of a conversation; None is no limit.
    max_turns:        most turns of a session, after which requests are refused; None is no limit.
    tool_format:      name of the parser of tool calls.
    force_sampling:   use the rollout's sampling, and a seed that depends on the session, whatever a request asks for. Otherwise
                      turns that were sampled differently are answered as asked, and marked as not trainable.
    seed:             sampling depends on it, the name of the session, and the request's number in it or own seed.
    """

    sampling: SamplingParams
    max_model_len: int
    tool_format: str = "hermes"
    force_sampling: bool = False
    seed: int = 0
    max_response_len: int | None = None
    max_turns: int | None = None


@dataclass
class Session:
    """Requests that belong together: one record, one stream of seeds.

    responses: the conversation up to each answer of the Responses API, by id.
    """

    name: str
    recorder: SessionRecorder
    generate: Generate
    settings: AnswerSettings
    num_requests: int = 0
    num_running: int = 0
    responses: dict[str, list[Message]] = field(default_factory=dict)

    def prompt_for(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Prompt:
        """`SessionRecorder.prompt_for`; ApiError if the chat template rejects the messages, or they are too long."""
        from jinja2 import TemplateError

        if getattr(self.recorder.renderer.tokenizer, "chat_template", None) is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        if not messages:
            raise ApiError(400, "there are no messages", param="messages")
        if self.recorder.renderer.encoder is None and any(isinstance(m.get("content"), list) for m in messages):
            raise ApiError(400, "only parts of text are supported: this model reads no images", param="messages")
        try:
            return self.recorder.prompt_for(messages, tools, self.settings.max_model_len)
        except TooLongError as error:
            raise self._too_long(str(error), self.settings.max_model_len) from error
        except ImageError as error:
            raise ApiError(400, str(error), param="messages") from error
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise ApiError(400, f"the model's chat template rejects the messages: {error}", param="messages") from error

    def prompt_for_text(self, text: str) -> Prompt:
        """`SessionRecorder.prompt_for_text`; ApiError if the text is too long."""
        try:
            return self.recorder.prompt_for_text(text, self.settings.max_model_len)
        except TooLongError as error:
            raise self._too_long(str(error), self.settings.max_model_len) from error

    def start(self, prompts: Sequence[Prompt], request: AnswerRequest) -> "list[AsyncIterator[Delta | Answer]]":
        """`request.n` answers to each prompt; ApiError before the first token if the request cannot be served."""
        most = self.settings.max_turns
        if most is not None and len(self.recorder.turns) >= most:
            raise ApiError(400, f"the conversation has had its {most} turns", code="turn_limit_reached")
        for prompt in prompts:
            self._check_length(prompt)
        has_seed = request.seed is not None and not self.settings.force_sampling
        number = request.seed if has_seed else f"request {self.num_requests}"
        self.num_requests += 1
        return [
            _Run(self, prompt, request, seed=_seed(self.settings.seed, self.name, number, index)).stream()
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n))
        ]

    def limit_of(self, prompt: Prompt) -> int:
        """Most tokens of the prompt and its answer."""
        settings = self.settings
        if settings.max_response_len is None:
            return settings.max_model_len
        first_ids = prompt.ids if prompt.parent is None else prompt.parent.path[0].added_ids
        return min(settings.max_model_len, len(first_ids) + settings.max_response_len)

    def _check_length(self, prompt: Prompt) -> None:
        limit = self.limit_of(prompt)
        if not prompt.ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        if len(prompt.ids) >= limit:
            raise self._too_long(f"{len(prompt.ids)} tokens", limit)

    @staticmethod
    def _too_long(length: str, limit: int) -> ApiError:
        message = f"the prompt is too long: {length}, but the model's context has {limit}, with the answer"
        return ApiError(400, message, code="context_length_exceeded", param="messages")


class _Run:
    """One answer that is being generated."""

    def __init__(self, session: Session, prompt: Prompt, request: AnswerRequest, seed: int) -> None:
        settings = session.settings
        self.session, self.prompt, self.request, self.seed = session, prompt, request, seed
        self.tokenizer = session.recorder.renderer.tokenizer
        self.parser = ToolParser.get_tool_parser(settings.tool_format, self.tokenizer) if request.tools else None
        wanted = settings.sampling if settings.force_sampling else _with_request(settings.sampling, request)
        self.trainable = wanted == settings.sampling
        stop_ids = (*wanted.stop_token_ids, *(self.parser.stop_token_ids if self.parser else ()))
        room = session.limit_of(prompt) - len(prompt.ids)
        self.max_tokens = min(request.max_tokens or settings.sampling.max_tokens, room)
        self.sampling = dataclasses.replace(wanted, stop_token_ids=stop_ids, max_tokens=self.max_tokens)
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.routes: np.ndarray | None = None
        self.images = prompt.images
        self.text = ""  # of token_ids, without the token that ended the answer
        self.shown = ""  # sent so far
        self.num_sent = 0  # tokens sent so far
        self.is_recorded = False

    async def stream(self) -> AsyncIterator[Delta | Answer]:
        """Deltas if the request streams, then the answer."""
        try:
            async for _ in self._generate():
                text = self._visible()
                if self.request.stream and text != self.shown:
                    yield self._delta(text)
            answer = await self._finish()
            if self.request.stream and (answer.text != self.shown or self.num_sent < len(self.token_ids)):
                yield self._delta(answer.text)
            yield answer
        finally:
            if self.num_sent and not self.is_recorded:  # the client has gone, or generation failed
                self._record({"role": "assistant", "content": self.shown}, self.shown, self.num_sent, "abort")

    async def _generate(self) -> AsyncIterator[None]:
        """Generate piece by piece; yields after each piece but the last."""
        in_pieces = self.request.stream or bool(self.request.stop)
        size = FIRST_PIECE if in_pieces else self.max_tokens
        while True:
            sampling = dataclasses.replace(self.sampling, max_tokens=min(size, self.max_tokens - len(self.token_ids)))
            request = GenerationRequest(self.prompt.ids + self.token_ids, sampling, self.seed, self.images)
            completion = await self._complete(request)
            start = len(self.token_ids)
            self.token_ids += completion.token_ids
            self.log_probs += completion.log_probs
            self.versions += completion.policy_versions
            self.routes = first_routes(self.routes, completion.routes)
            self.stop_reason = completion.stop_reason
            self.text = self._decode(self.token_ids[:-1] if self.stop_reason == "stop" else self.token_ids)
            self.stop_string = self._cut_at_stop_string(start)
            if self.stop_reason == "stop" or len(self.token_ids) >= self.max_tokens:
                return
            yield
            size = min(2 * size, LARGEST_PIECE)

    async def _complete(self, request: GenerationRequest) -> Completion:
        stopped = ApiError(503, "generation was stopped by the server")
        try:
            completion = await self.session.generate(request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise stopped from None  # by the rollout, not by this server
        if completion.stop_reason == "abort":
            raise stopped
        return completion

    def _decode(self, ids: list[int]) -> str:
        # calls may be written with special tokens
        text: str = self.tokenizer.decode(ids, skip_special_tokens=self.parser is None)
        return text

    def _cut_at_stop_string(self, start: int) -> str | None:
        """If the text has a stop string, drop what follows it; the tokens up to the one that completes it stay.

        start: number of tokens whose text had none.
        """
        found = [(self.text.find(stop), stop) for stop in self.request.stop if stop in self.text]
        if not found:
            return None
        position, stop = min(found)
        length = start + 1
        while length < len(self.token_ids) and stop not in self._decode(self.token_ids[:length]):
            length += 1
        for tokens in (self.token_ids, self.log_probs, self.versions):
            del tokens[length:]
        self.text, self.stop_reason = self.text[:position], "stop"
        return stop

    def _visible(self) -> str:
        """The text that later tokens cannot change; with tools, up to the first tag, which may begin a call."""
        text = self.text.rstrip("\N{REPLACEMENT CHARACTER}")  # an incomplete character
        if self.parser is not None:
            text = text.partition("<")[0]
            text = text if text.strip() else ""
        begun = [k for stop in self.request.stop for k in range(1, len(stop)) if text.endswith(stop[:k])]
        text = text[: len(text) - max(begun, default=0)]
        return text if len(text) > len(self.shown) else self.shown

    def _delta(self, text: str) -> Delta:
        sent, self.num_sent = self.num_sent, len(self.token_ids)
        part, self.shown = text.removeprefix(self.shown), text
        return Delta(part, self.token_ids[sent:], self.log_probs[sent:])

    async def _finish(self) -> Answer:
        text, calls = (self.text, []) if self.parser is None else await self._tool_calls(self.parser)
        finish: Any = "tool_calls" if calls else self.stop_reason
        answer = Answer(
            text, calls, finish, self.stop_string, self.prompt.ids, list(self.token_ids), list(self.log_probs)
        )
        self._record(answer.message, text, len(self.token_ids), self.stop_reason)
        return answer

    async def _tool_calls(self, parser: ToolParser) -> tuple[str, list[dict[str, Any]]]:
        content, calls = await parser.extract_tool_calls(self.token_ids, [*map(parser_schema, self.request.tools)])
        if self.stop_reason == "stop":
            content = content.removesuffix(self._decode(self.token_ids[-1:]))
        if self.stop_string is not None:
            content = content.partition(self.stop_string)[0]
        for token in self.tokenizer.all_special_tokens:
            content = content.replace(token, "")
        if calls and not content.strip():
            content = ""
        content = self.shown + content.removeprefix(self.shown)
        ids = [_seed(self.seed, len(self.prompt.ids), number) for number in range(len(calls))]
        return content, [_message_call(call, id) for call, id in zip(calls, ids)]

    def _record(self, message: Message, text: str, num_tokens: int, stop_reason: Any) -> None:
        self.is_recorded = True
        completion = Completion(
            self.token_ids[:num_tokens],
            self.log_probs[:num_tokens],
            stop_reason,
            self.versions[:num_tokens],
            routes=None if self.routes is None else self.routes[: len(self.prompt.ids) + num_tokens],
        )
        answer = text if isinstance(self.prompt.key, str) else message
        self.session.recorder.add(self.prompt, answer, completion, trainable=self.trainable)


def _with_request(sampling: SamplingParams, request: AnswerRequest) -> SamplingParams:
    asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    try:
        return dataclasses.replace(sampling, **{name: value for name, value in asked.items() if value is not None})
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _seed(*parts: object) -> int:
    words = "/".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1


def _message_call(call: FunctionCall, id: int) -> dict[str, Any]:
    """A call of a Message. id: the same in every run, because some templates render it; some of them want nine characters."""
    function = {"name": call.name, "arguments": arguments_object(call.arguments)}
    return {"id": call.id or f"{id:016x}"[:9], "type": "function", "function": function}


def parser_schema(tool: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
    """What parsers read of a tool: its name, required arguments, and the types of those that have one.

    ValueError if its JSON schema is wrong.
    """
    parameters = tool["function"].get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(properties, dict):
        raise ValueError(f"properties must be an object, not {properties!r:.80}")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"required must be a list of names, not {required!r:.80}")
    for name, value in properties.items():
        if not isinstance(value, dict | bool):
            raise ValueError(f"properties.{name} must be an object, not {value!r:.80}")
    typed = {name: value for name, value in properties.items() if isinstance(value, dict) and "type" in value}
    function = {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description") or "",
        "parameters": {"type": "object", "properties": typed, "required": [name for name in required if name in typed]},
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


async def merged(streams: "Sequence[AsyncIterator[Delta | Answer]]") -> "AsyncIterator[tuple[int, Delta | Answer]]":
    """The items of all streams with the number of their stream, as they come; the first error ends them all."""
    queue: asyncio.Queue[tuple[int, Delta | Answer | BaseException | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((number, item))
            await queue.put((number, None))
        except Exception as error:  # noqa: BLE001 - raised below
            await queue.put((number, error))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
