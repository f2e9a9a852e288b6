"""Messages to tokens by the model's chat template, and the bridge: the tokens between an assistant turn and the next one.

    … sampled tokens <end of turn> │ tool and user messages, generation prompt │ sampled tokens …
                                     ^ `Renderer.bridge`

The template is rendered with a marker as the assistant turn, followed by the new messages; the tokens after the marker's end of
turn are the bridge. Its cost does not depend on the length of the conversation, and what the model sampled is never rendered.
The marker is a hash of the messages, so that they cannot contain it.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError

from lockstep.agents.schemas import arguments_object
from lockstep.data.image_prompts import ImageEncoder, image_values, read_part
from lockstep.data.images import ImageError, Picture, data_uri, read_image
from lockstep.protocol.images import ImageInputs
from lockstep.utils.untrusted import valid_text

logger = logging.getLogger(__name__)

Message = dict[str, Any]
"""`role` and `content` (text, or a list of parts `{"type": "text", "text": …}` and `{"type": "image", "image": a data URI}`); of an
assistant also `tool_calls`, of a tool `tool_call_id`:
{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}."""
Content = str | list[Message]
Tools = Sequence[Mapping[str, Any]]

LONGEST_TOKEN = 128
"""Bytes of text that one token of any tokenizer may stand for, such as a word that is not in its vocabulary."""
CHARS_PER_TOKEN = 8
"""Most texts have more tokens than one for so many characters."""
CUT_TOKENS = 16
"""Tokens that the end of a text may have more if it is cut there."""
QUESTION: Message = {"role": "user", "content": "Hello"}
RESULT: Message = {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": "RESULT7719"}


@dataclass(frozen=True)
class TurnForm:
    """Where an assistant turn has the marker.

    arguments: in its calls, whose arguments are an object or JSON text; None: in its content.
    content:   of a turn with calls.
    """

    arguments: Literal["object", "text"] | None = None
    content: str | None = None

    def turn(self, marker: str, last: Message, results: Sequence[Message]) -> Message:
        """The turn. last: the one before `results`, which answer its calls."""
        if self.arguments is None:
            return {"role": "assistant", "content": marker}
        arguments = {"value": marker} if self.arguments == "object" else f'{{"value": "{marker}"}}'
        return {"role": "assistant", "content": self.content, "tool_calls": _calls(last, results, arguments)}


PLAIN = TurnForm()
CALL_FORMS = (TurnForm("object"), TurnForm("object", ""), TurnForm("text"), TurnForm("text", ""), PLAIN)
"""How templates expect an assistant turn with calls: arguments as an object or as JSON text, content null or empty. The last is for
templates that render no calls: they are part of the turn's text."""


def content_of(text: str, images: Sequence[str]) -> Content:
    """The images, given as data URIs, then the text."""
    if not images:
        return text
    parts: list[Message] = [{"type": "image", "image": image} for image in images]
    return [*parts, *([{"type": "text", "text": text}] if text else [])]


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """All texts of the messages' contents."""
    contents = [message.get("content") or "" for message in messages]
    parts = [[content] if isinstance(content, str) else [part.get("text") for part in content] for content in contents]
    return [text for texts in parts for text in texts if isinstance(text, str)]


def _pictures(messages: Sequence[Message]) -> list[Picture]:
    return [read_image(value) for value in image_values(messages)]


class Bridge(NamedTuple):
    """Tokens between an assistant turn and the next one, and the images whose placeholders are among them."""

    ids: list[int]
    images: ImageInputs | None


class TooLongError(ValueError):
    """A text has more tokens than there is room for; it was not tokenized."""


class Renderer:
    """Renders messages with a tokenizer's chat template.

    stop_ids:        tokens that end an assistant turn.
    template_kwargs: further variables of the template.
    encoder:         prepares images of messages; None if the model reads none.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.stop_ids = frozenset(stop_ids)
        self.template_kwargs = dict(template_kwargs or {})
        self._special = sorted({str(token) for token in tokenizer.all_special_tokens} | _added_special(tokenizer))
        self._special_ids = frozenset(tokenizer.convert_tokens_to_ids(self._special))

    def check(self) -> None:
        """ValueError if the template does not show where an assistant turn ends."""
        if self.bridge([], [QUESTION]) is None:
            raise ValueError(
                "the chat template does not show where an assistant turn ends; set actor_rollout_ref.model.custom_chat_template"
            )
        for role in (role for role, is_exact in self.exact.items() if not is_exact):
            logger.info("the chat template changes earlier turns if a %s message follows; see docs/agents.md", role)

    @cached_property
    def tool_role(self) -> str:
        """The role of tool results: "user" if the template refuses "tool" or leaves it out."""
        if self._call_form is None:
            logger.info("the chat template has no role for tool results; they are sent as user messages")
            return "user"
        return "tool"

    @cached_property
    def exact(self) -> dict[str, bool]:
        """For each role that can follow an assistant turn, whether appending the bridge gives the tokens of rendering the whole
        conversation. If not, the template rewrites earlier turns."""
        return {role: self._is_exact(role) for role in dict.fromkeys(["user", self.tool_role])}

    def text(self, messages: Sequence[Message], tools: Tools | None = None, *, prompt: bool = True) -> str:
        """The whole conversation as text. prompt: with the generation prompt."""
        rendered: str = self.tokenizer.apply_chat_template(
            list(messages) if self.encoder is None else self.encoder.templated(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
            **self.template_kwargs,
        )
        return rendered

    def ids(self, messages: Sequence[Message], tools: Tools | None = None, max_tokens: int | None = None) -> list[int]:
        """The whole conversation as tokens, with the generation prompt. max_tokens: see `encode`."""
        return self.ids_and_images(messages, tools, max_tokens)[0]

    def ids_and_images(
        self, messages: Sequence[Message], tools: Tools | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], ImageInputs | None]:
        """`ids`, and the images of the messages."""
        return self.encode_with(self.text(self._fitted(messages), tools), _pictures(messages), max_tokens)

    def encode_with(
        self, text: str, pictures: Sequence[Picture], max_tokens: int | None = None
    ) -> tuple[list[int], ImageInputs | None]:
        """`encode` of a text in which the template has written an image token for each picture."""
        if not pictures:
            return self.encode(text, max_tokens), None
        if self.encoder is None:
            raise ImageError("the messages have images, but the model reads none")
        return self.encoder(valid_text(text), pictures)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """The tokens of a text, whose special tokens count as such.

        max_tokens: TooLongError if a small part of the text has more; otherwise the caller checks the number.
        """
        if max_tokens is not None:
            self.check_length(text, max_tokens)
            start = text[: CHARS_PER_TOKEN * max_tokens]
            if len(start) < len(text) and len(self.encode(start)) > max_tokens + CUT_TOKENS:
                raise TooLongError(f"more than {max_tokens} tokens")
        return list(self.tokenizer(valid_text(text), add_special_tokens=False)["input_ids"])

    def check_length(self, text: str, max_tokens: int) -> None:
        """TooLongError if a text has so many bytes that it cannot have as few tokens."""
        max_bytes = max_tokens * self._longest_token
        if len(text) > max_bytes or len(text.encode(errors="replace")) > max_bytes:
            raise TooLongError(f"more than {max_tokens} tokens")

    @cached_property
    def _longest_token(self) -> int:
        """Most bytes of text that one token stands for."""
        return max(LONGEST_TOKEN, *(len(token.encode(errors="replace")) for token in self.tokenizer.get_vocab()))

    def bridge(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        last_id: int | None = None,
        tools: Tools | None = None,
        max_tokens: int | None = None,
    ) -> Bridge | None:
        """What follows an assistant turn: the rest of its end, `new` messages and the generation prompt.

        None if the template does not show where the turn ends.
        messages: the conversation up to the turn; the bridge depends only on its system message and the names of the turn's calls.
        last_id:  the last sampled token; if it ends the turn, the end is not repeated.
        max_tokens: see `encode`.
        """
        results = list(takewhile(lambda message: message["role"] == "tool", new))
        form = self._call_form if results else PLAIN
        if form is None:
            return None
        marker, text = self._with_marker(form, messages, new, results, tools)
        split = self._split_end(text, marker, form, max_tokens, _pictures(new))
        if split is None:
            return None
        end, rest, images = split
        return Bridge(rest if last_id in self.stop_ids else end + rest, images)

    def is_rewritten(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools | None = None) -> bool:
        """Whether the template renders `messages`, which end with an assistant turn, differently once `new` follow.

        False if it refuses them, such as a result whose call could not be parsed: then there is nothing to follow.
        """
        before, after = self._fitted(messages), self._fitted([*messages, *new])
        try:
            return not self.text(after, tools).startswith(self.text(before, tools, prompt=False))
        except TemplateError:
            return False

    def as_plain_text(self, content: str) -> str:
        """`content` without special tokens, which a tool or user could use to fake a turn: a space breaks them up.

        Lone surrogates, which no tokenizer takes, are replaced.
        """
        for token in self._special:
            if token in content:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        return valid_text(content)

    def plain_messages(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, trusted: Collection[str] = ()
    ) -> list[Message]:
        """Messages that come from outside, with all their text as plain text: content, names, ids, calls and their arguments.

        max_tokens: TooLongError if the messages cannot have as few.
        trusted:    texts of contents that stay as they are, such as those of the row.
        """
        plain = []
        for number, message in enumerate(messages):
            content = message.get("content")
            if max_tokens is not None and isinstance(content, str):
                self.check_length(content, max_tokens)
            if isinstance(content, list | tuple):
                kept: Message = {"content": [self._plain_part(part, number, max_tokens, trusted) for part in content]}
                message = {**message, "content": None}
            else:
                kept = {"content": content} if isinstance(content, str) and content in trusted else {}
            plain.append(self.as_plain(message) | kept)
        return plain

    def _plain_part(self, part: Any, message: int, max_tokens: int | None, trusted: Collection[str]) -> Message:
        """A part of a content: plain text, or an image as a data URI; ImageError for an image that is given by its place."""
        kind, value = read_part(part, message)
        if kind == "text":
            if max_tokens is not None:
                self.check_length(value, max_tokens)
            return {"type": "text", "text": value if value in trusted else self.as_plain_text(value)}
        given, key = value, None
        while isinstance(given, Mapping):
            key = next((key for key in ("image", "image_url", "url", "bytes", "base64") if key in given), None)
            given = None if key is None else given[key]
        if key == "base64":
            return {"type": "image", "image": data_uri(read_image({"base64": given}))}
        if isinstance(given, str) and given.startswith("data:"):
            read_image(given)
            return {"type": "image", "image": given}
        if given is None or isinstance(given, str | Path):
            raise ImageError(f"an image of message {message} is not a data URI (data:image/png;base64,...)")
        return {"type": "image", "image": data_uri(read_image(given))}

    def as_plain(self, value: Any) -> Any:
        """JSON data with all its text as plain text."""
        if isinstance(value, str):
            return self.as_plain_text(value)
        if isinstance(value, Mapping):
            return {self.as_plain(name): self.as_plain(item) for name, item in value.items()}
        return [self.as_plain(item) for item in value] if isinstance(value, list | tuple) else value

    def tool_messages(self, results: Sequence[tuple[str, str, Content]]) -> list[Message]:
        """Messages with the results of calls, each given as (name, id, content)."""
        if self.tool_role == "user":
            contents = [content for _, _, content in results]
            texts = [content for content in contents if isinstance(content, str)]
            if len(texts) == len(contents):
                return [{"role": "user", "content": "\n".join(texts)}]
            parts = [[{"type": "text", "text": c}] if isinstance(c, str) else c for c in contents]
            return [{"role": "user", "content": [part for content in parts for part in content]}]
        return [{"role": "tool", "name": name, "tool_call_id": call_id, "content": c} for name, call_id, c in results]

    def _fitted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the arguments of calls as the template expects them: objects or JSON text."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        as_text = self._call_form is not None and self._call_form.arguments == "text"
        return [self._with_calls(m, as_text) if m.get("tool_calls") else m for m in messages]

    def _with_calls(self, message: Message, as_text: bool) -> Message:
        """Special tokens in the calls are broken up when the arguments have their form: JSON text may hide them in escapes."""

        def fitted(arguments: Any) -> Any:
            if isinstance(arguments, str) and not as_text:
                arguments = arguments_object(arguments)
            plain = self.as_plain(arguments)
            return json.dumps(plain, ensure_ascii=False) if as_text and not isinstance(plain, str) else plain

        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = fitted(function.get("arguments", {}))
            calls.append(call | {"function": self.as_plain(function) | {"arguments": arguments}})
        return message | {"tool_calls": calls}

    @cached_property
    def _call_form(self) -> TurnForm | None:
        """How the template expects a turn with calls; None if it cannot render their results."""
        for form in CALL_FORMS:
            try:
                marker, text = self._with_marker(form, [], [RESULT], [RESULT])
            except (TemplateError, TypeError, ValueError):
                continue
            is_shown = RESULT["content"] in text.rpartition(marker)[2]
            if is_shown and self._split_end(text, marker, form) is not None:
                return form
        return None

    def _with_marker(
        self,
        form: TurnForm,
        messages: Sequence[Message],
        new: Sequence[Message],
        results: Sequence[Message],
        tools: Tools | None = None,
    ) -> tuple[str, str]:
        """The marker, and a short conversation whose assistant turn has it. results: the tool messages that answer its calls."""
        system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
        last = messages[-1] if messages else {}
        given = json.dumps([system, last.get("tool_calls"), list(new), list(tools or ())], default=str)
        marker = f"M{hashlib.blake2b(given.encode(), digest_size=16).hexdigest()}M"
        return marker, self.text([*system, QUESTION, form.turn(marker, last, results), *new], tools)

    def _split_end(
        self,
        text: str,
        marker: str,
        form: TurnForm,
        max_tokens: int | None = None,
        pictures: Sequence[Picture] = (),
    ) -> tuple[list[int], list[int], ImageInputs | None] | None:
        """The token that ends the turn with the marker, those after it, and their images.

        Some templates end turns with plain text: it is part of the rest. After calls, whose syntax follows the marker, the end
        cannot be told from it, and the result is None. So it is if the template leaves out the turn.
        """
        _, found, tail = text.rpartition(marker)
        if not found:
            return None
        has_calls = form is not PLAIN
        ids, images = self.encode_with(tail, pictures, max_tokens)
        # a template may end earlier turns with another token than the last one, which the model samples
        for ends in (self.stop_ids, self._special_ids):
            at = next((number for number, token in enumerate(ids) if token in ends), None)
            if at is not None and (has_calls or not self.tokenizer.decode(ids[:at], skip_special_tokens=True).strip()):
                return ids[at : at + 1], ids[at + 1 :], images
        return None if has_calls else ([], ids, images)

    def _is_exact(self, role: str) -> bool:
        new = [RESULT] if role == "tool" else [QUESTION]
        try:
            prompt = self.text([QUESTION])
            bridge = self.bridge([], new)
            _, whole = self._with_marker((role == "tool" and self._call_form) or PLAIN, [], new, new)
        except TemplateError:
            return False
        if bridge is None or not whole.startswith(prompt):
            return False
        ids, prompt_ids = self.encode(whole), self.encode(prompt)
        return ids[len(ids) - len(bridge.ids) :] == bridge.ids and ids[: len(prompt_ids)] == prompt_ids


def _calls(turn: Message, results: Sequence[Message], arguments: Any) -> list[dict[str, Any]]:
    """The calls that tool messages answer. Names that the messages lack are those of the turn's calls, by id or by place."""
    names = [call["function"]["name"] for call in turn.get("tool_calls") or ()]
    name_of = {call.get("id"): name for call, name in zip(turn.get("tool_calls") or (), names)}
    calls = []
    for number, result in enumerate(results):
        call_id = result.get("tool_call_id") or RESULT["tool_call_id"]
        by_place = names[number] if number < len(names) else RESULT["name"]
        name = result.get("name") or name_of.get(call_id, by_place)
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _added_special(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content for token in added.values() if token.special}
