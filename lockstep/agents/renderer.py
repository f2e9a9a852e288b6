"""Messages to tokens by the model's chat template, and the bridge: the tokens between an assistant turn and the next one.

    … sampled tokens <end of turn> │ tool and user messages, generation prompt │ sampled tokens …
                                     ^ `Renderer.bridge`

The template is rendered with a marker as the assistant turn, followed by the new messages; the tokens after the marker's end of
turn are the bridge. Its cost does not depend on the length of the conversation, and what the model sampled is never rendered.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from lockstep.agents.schemas import arguments_object

logger = logging.getLogger(__name__)

Message = dict[str, Any]
"""`role` and `content` (text); of an assistant also `tool_calls`, of a tool `tool_call_id`:
{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}."""
Tools = Sequence[Mapping[str, Any]]

MARKER = "QXZJ7719MARKER"
"""Text that no template produces by itself."""
QUESTION: Message = {"role": "user", "content": "Hello"}
RESULT: Message = {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": "RESULT7719"}


@dataclass(frozen=True)
class TurnForm:
    """An assistant turn with the marker: in its content, or in the arguments of its calls."""

    content: str | None
    arguments: Any = None


PLAIN = TurnForm(MARKER)
CALL_FORMS = (
    *(TurnForm(c, a) for a in ({"value": MARKER}, f'{{"value": "{MARKER}"}}') for c in (None, "")),
    PLAIN,
)
"""How templates expect an assistant turn with calls: arguments as an object or as JSON text, content null or empty. The last is for
templates that render no calls: they are part of the turn's text."""


class Renderer:
    """Renders messages with a tokenizer's chat template.

    stop_ids:        tokens that end an assistant turn.
    template_kwargs: further variables of the template.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: Sequence[int], template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
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
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
            **self.template_kwargs,
        )
        return rendered

    def ids(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The whole conversation as tokens, with the generation prompt."""
        return self.encode(self.text(self._fitted(messages), tools))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def bridge(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        last_id: int | None = None,
        tools: Tools | None = None,
    ) -> list[int] | None:
        """The tokens after an assistant turn: what is left of its end, `new` messages and the generation prompt.

        None if the template does not show where the turn ends.
        messages: the conversation up to the turn; the bridge depends only on its system message and the names of the turn's calls.
        last_id:  the last sampled token; if it ends the turn, the end is not repeated.
        """
        results = list(takewhile(lambda message: message["role"] == "tool", new))
        form = self._call_form if results else PLAIN
        if form is None:
            return None
        _, found, tail = self._with_marker(form, messages, new, results, tools).rpartition(MARKER)
        split = self._split_end(tail, has_calls=form is not PLAIN) if found else None
        if split is None:
            return None
        end, rest = split
        return rest if last_id in self.stop_ids else end + rest

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
        """`content` without special tokens, which a tool or user could use to fake a turn: a space breaks them up."""
        for token in self._special:
            if token in content:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        return content

    def tool_messages(self, results: Sequence[tuple[str, str, str]]) -> list[Message]:
        """Messages with the results of calls, each given as (name, id, text)."""
        if self.tool_role == "user":
            return [{"role": "user", "content": "\n".join(text for _, _, text in results)}]
        return [{"role": "tool", "name": name, "tool_call_id": call_id, "content": t} for name, call_id, t in results]

    def _fitted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the arguments of calls as the template expects them: objects or JSON text."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        as_text = self._call_form is not None and isinstance(self._call_form.arguments, str)
        return [_with_arguments(m, as_text) if m.get("tool_calls") else m for m in messages]

    @cached_property
    def _call_form(self) -> TurnForm | None:
        """How the template expects a turn with calls; None if it cannot render their results."""
        for form in CALL_FORMS:
            try:
                _, found, tail = self._with_marker(form, [], [RESULT], [RESULT]).rpartition(MARKER)
            except (TemplateError, TypeError, ValueError):
                continue
            if found and RESULT["content"] in tail and self._split_end(tail, has_calls=form is not PLAIN) is not None:
                return form
        return None

    def _with_marker(
        self,
        form: TurnForm,
        messages: Sequence[Message],
        new: Sequence[Message],
        results: Sequence[Message],
        tools: Tools | None = None,
    ) -> str:
        """A short conversation whose assistant turn has the marker, as text. results: the tool messages that answer its calls."""
        system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
        turn: Message = {"role": "assistant", "content": form.content}
        if form.arguments is not None:
            turn["tool_calls"] = _calls(messages[-1] if messages else {}, results, form.arguments)
        return self.text([*system, QUESTION, turn, *new], tools)

    def _split_end(self, tail: str, has_calls: bool) -> tuple[list[int], list[int]] | None:
        """The token that ends the turn, and those after it. tail: the text after the marker.

        Some templates end turns with plain text: it is part of the rest. After calls, whose syntax follows the marker, the end
        cannot be told from it, and the result is None.
        """
        ids = self.encode(tail)
        # a template may end earlier turns with another token than the last one, which the model samples
        for ends in (self.stop_ids, self._special_ids):
            at = next((number for number, token in enumerate(ids) if token in ends), None)
            if at is not None and (has_calls or not self.tokenizer.decode(ids[:at], skip_special_tokens=True).strip()):
                return ids[at : at + 1], ids[at + 1 :]
        return None if has_calls else ([], ids)

    def _is_exact(self, role: str) -> bool:
        new = [RESULT] if role == "tool" else [QUESTION]
        try:
            prompt, bridge = self.text([QUESTION]), self.bridge([], new)
            whole = self._with_marker((role == "tool" and self._call_form) or PLAIN, [], new, new)
        except TemplateError:
            return False
        if bridge is None or not whole.startswith(prompt):
            return False
        ids, prompt_ids = self.encode(whole), self.encode(prompt)
        return ids[len(ids) - len(bridge) :] == bridge and ids[: len(prompt_ids)] == prompt_ids


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


def _with_arguments(message: Message, as_text: bool) -> Message:
    def fitted(arguments: Any) -> Any:
        if isinstance(arguments, str):
            return arguments if as_text else arguments_object(arguments)
        return json.dumps(arguments, ensure_ascii=False) if as_text else arguments

    functions = [
        call["function"] | {"arguments": fitted(call["function"].get("arguments", {}))}
        for call in message["tool_calls"]
    ]
    calls = [call | {"function": function} for call, function in zip(message["tool_calls"], functions)]
    return message | {"tool_calls": calls}


def _added_special(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content for token in added.values() if token.special}
