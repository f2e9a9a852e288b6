"""What the protocols share: validated request bodies, text of content parts, ids."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, ValidationError

from lockstep.agents.endpoint.answers import Answer, AnswerRequest, Delta, Session, parser_schema
from lockstep.agents.endpoint.errors import ApiError, invalid
from lockstep.agents.endpoint.recorder import Prompt
from lockstep.agents.renderer import Content, Message
from lockstep.utils.untrusted import JSON_ERRORS

Event = tuple[str | None, dict[str, Any] | str]
"""The name (not in chat and plain completions) and data of a server-sent event."""
Items = AsyncIterator[tuple[int, Delta | Answer]]

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_IMAGE_PARTS = ("image_url", "input_image", "image")


class Body(BaseModel):
    """A request's body; unknown fields are ignored, unless they are in `only`.

    only: fields that would change the answer but cannot be served, with the values that change nothing.
    """

    only: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    stream: bool = False

    @classmethod
    def read(cls, data: Any) -> Self:
        """ApiError with the first wrong field."""
        if not isinstance(data, dict):
            raise invalid("the body must be a JSON object")
        for name, neutral in cls.only.items():
            if data.get(name) is not None and data[name] not in neutral:
                allowed = "".join(f"set {json.dumps(value)}, or " for value in neutral[:1])
                raise invalid(f"{name}={json.dumps(data[name])[:200]} is not supported; {allowed}leave it out", name)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise invalid(f"{place}: {first['msg']}", place) from error

    def answer_request(self, **more: Any) -> AnswerRequest:
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "stream")
        return AnswerRequest(**{name: getattr(self, name) for name in names}, **more)


class ProtocolCall(ABC):
    """One request of a protocol: its prompts, and its answers in the protocol's form."""

    body: Body
    prompts: list[Prompt]
    request: AnswerRequest

    @abstractmethod
    def __init__(self, data: Any, session: Session) -> None:
        """ApiError if the request is wrong or cannot be served."""

    @abstractmethod
    def document(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response; answers: `request.n` of each prompt."""

    @abstractmethod
    def events(self, items: Items) -> AsyncIterator[Event]:
        """The events of a streamed response."""

    def error_event(self, error: ApiError) -> Event:
        """The event of an error in the middle of a stream."""
        return None, error.openai()


def text_of(content: Any, place: str, supported: str = "text") -> str:
    """The text of a message's content, which is text or a list of parts; ApiError for images and other parts.

    supported: the parts that the message may have, for the error.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise invalid(f"{place}: must be text or a list of parts", place)
    for part in content:
        kind = part.get("type")
        if kind not in _TEXT_PARTS or not isinstance(part.get("text", part.get("refusal")), str):
            raise invalid(f"{place}: only parts of {supported} are supported, not {kind!r}", place)
    return "".join(part.get("text", part.get("refusal")) for part in content)


def content_of(content: Any, place: str) -> Content:
    """The text of a content or, if it has images, its parts: OpenAI's image_url and input_image, Anthropic's image, and image parts
    of a row's prompt."""
    if not isinstance(content, list) or not any(isinstance(p, dict) and p.get("type") in _IMAGE_PARTS for p in content):
        return text_of(content, place, "text and images")
    return [image_of(p, place) if p.get("type") in _IMAGE_PARTS else _text(p, place) for p in content]


def _text(part: Any, place: str) -> Message:
    return {"type": "text", "text": text_of([part], place, "text and images")}


def image_of(part: dict[str, Any], place: str) -> Message:
    """An image part, for the chat template; ApiError if its image is not a data URI."""
    kind = part.get("type")
    if kind not in _IMAGE_PARTS:
        raise invalid(f"{place}: only parts with images are supported, not {kind!r}", place)
    value = part.get("source", part.get("image")) if kind == "image" else part.get("image_url", part.get("url"))
    if kind == "image" and isinstance(value, dict):
        value = f"data:{value.get('media_type')};base64,{value.get('data')}" if value.get("type") == "base64" else None
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url.startswith("data:"):
        raise invalid(f"{place}: {kind!r} must have a data URI (data:image/png;base64,...)", place)
    return {"type": "image", "image": url}


def arguments_of(text: Any, place: str) -> Any:
    """A call's arguments for the chat template: an object, or the text if it is none; ApiError if they are not text."""
    if text is not None and not isinstance(text, str):
        raise invalid(f"{place}: the arguments of a call must be JSON text", place)
    try:
        value = json.loads(text or "{}")
    except JSON_ERRORS:
        return text
    return value if isinstance(value, dict) else text


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None, place: str) -> dict[str, Any]:
    """A tool in OpenAI's form; ApiError if it is wrong. place: of its schema in the request."""
    parameters = parameters or {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}
    try:
        parser_schema(tool)
    except ValueError as error:
        raise invalid(f"{place}: {error}", place) from error
    return tool


def allowed_tools(tools: list[dict[str, Any]], choice: Any) -> tuple[dict[str, Any], ...]:
    """The tools to show to the model, by the request's tool_choice."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "none":
        return ()
    if kind not in (None, "auto"):
        raise invalid(f"tool_choice={json.dumps(choice)} cannot be enforced; use auto or none", "tool_choice")
    return tuple(tools)


def json_arguments(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())
