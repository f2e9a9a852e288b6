"""The bridge between turns: the tokens that a model's chat template puts between an assistant turn and the next one.

    … sampled tokens <end of turn> │ tool and user messages, generation prompt │ sampled tokens …
                                     ^ `Renderer.bridge`

The template is rendered with a marker as the assistant turn, followed by the new messages; the tokens after the marker's end of
turn are the bridge. Its cost does not depend on the length of the conversation, and what the model sampled is never rendered.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

logger = logging.getLogger(__name__)

Message = dict[str, Any]

MARKER = "QXZJ7719MARKER"
"""Text that no template produces by itself."""
PROBE = ("tool", "call00000", "RESULT7719")
QUESTION: Message = {"role": "user", "content": "Hello"}


class Renderer:
    """Renders messages with a tokenizer's chat template.

    stop_ids:  tokens that end an assistant turn.
    tool_role: the role of tool results: "user" if the template refuses "tool".
    exact:     for each role that can follow an assistant turn, whether appending the bridge gives the tokens of rendering the
               whole conversation. If not, the template rewrites earlier turns.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: Sequence[int], template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self._kwargs = dict(template_kwargs or {})
        self._special = sorted({str(token) for token in tokenizer.all_special_tokens} | _added_special(tokenizer))
        self._special_ids = frozenset(tokenizer.convert_tokens_to_ids(self._special))
        self._call_forms = _CALL_FORMS
        self.tool_role = "tool"
        self.exact: dict[str, bool] = {}
        self._probe()

    def text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: bool = True
    ) -> str:
        """The whole conversation as text. prompt: with the generation prompt."""
        rendered: str = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
            **self._kwargs,
        )
        return rendered

    def ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The whole conversation as tokens, with the generation prompt."""
        return self._encode(self.text(messages, tools))

    def bridge(self, new: Sequence[Message], last_id: int | None = None) -> list[int]:
        """The tokens after an assistant turn: what is left of its end, `new` messages and the generation prompt.

        last_id: the last sampled token; if it ends the turn, the end is not repeated.
        """
        ids = self._after_turn(new)
        return ids[1:] if last_id in self.stop_ids else ids

    def is_rewritten(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        """Whether the template renders `messages`, which end with an assistant turn, differently once `new` follow."""
        return not self.text([*messages, *new], tools).startswith(self.text(messages, tools, prompt=False))

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

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _after_turn(self, new: Sequence[Message]) -> list[int]:
        """Tokens from the end of the assistant turn on."""
        rendered = self._with_marker(new)
        ids = self._encode(rendered[rendered.rindex(MARKER) + len(MARKER) :])
        # a template may end earlier turns with another token than the last one, which the model samples
        for ends in (self.stop_ids, self._special_ids):
            for number, token in enumerate(ids):
                if token in ends:
                    return ids[number:]
        raise ValueError(
            "the chat template ends an assistant turn with no special token, so its end cannot be found; set "
            "actor_rollout_ref.model.custom_chat_template"
        )

    def _with_marker(self, new: Sequence[Message]) -> str:
        """The text of a conversation whose assistant turn has the marker, in the first form that the template accepts."""
        called = [message for message in new if message["role"] == "tool"]
        if not called:
            return self.text([QUESTION, {"role": "assistant", "content": MARKER}, *new])
        failure: Exception | None = None
        for form in self._call_forms:
            turn: Message = {"role": "assistant", "content": form["content"]}
            if form["arguments"] is not None:
                turn["tool_calls"] = [_call(message, form["arguments"]) for message in called]
            try:
                rendered = self.text([QUESTION, turn, *new])
            except (TemplateError, TypeError, ValueError) as error:
                failure = error
                continue
            is_known = len(self._call_forms) == 1
            if MARKER in rendered and (is_known or new[0]["content"] in rendered[rendered.rindex(MARKER) :]):
                self._call_forms = (form,)
                return rendered
        raise ValueError(f"the chat template cannot render tool results: {failure or 'it leaves them out'}")

    def _probe(self) -> None:
        """Find the role of tool results, and compare bridges with full renderings."""
        try:
            self._after_turn(self.tool_messages([PROBE]))
        except (TemplateError, TypeError, ValueError) as error:
            self.tool_role, self._call_forms = "user", _CALL_FORMS
            logger.info("the chat template has no role for tool results (%s); they are sent as user messages", error)
        for role in dict.fromkeys(["user", self.tool_role]):
            self.exact[role] = self._is_exact(role)

    def _is_exact(self, role: str) -> bool:
        new = self.tool_messages([PROBE]) if role == "tool" else [QUESTION]
        try:
            prompt, whole = self.text([QUESTION]), self._with_marker(new)
        except TemplateError:
            return False
        if not whole.startswith(prompt):
            return False
        bridge, ids = self._after_turn(new), self._encode(whole)
        return ids[len(ids) - len(bridge) :] == bridge and ids[: len(self._encode(prompt))] == self._encode(prompt)


def _call(result: Message, arguments: Any) -> dict[str, Any]:
    """The call that a tool message answers."""
    function = {"name": result["name"], "arguments": arguments}
    return {"id": result["tool_call_id"], "type": "function", "function": function}


_AS_OBJECT, _AS_TEXT = {"value": MARKER}, f'{{"value": "{MARKER}"}}'
_CALL_FORMS: tuple[dict[str, Any], ...] = (
    *({"content": content, "arguments": arguments} for arguments in (_AS_OBJECT, _AS_TEXT) for content in (None, "")),
    {"content": MARKER, "arguments": None},
)
"""How templates expect an assistant turn with calls: arguments as an object or as JSON text, content null or empty. The last is for
templates that render no calls: they are part of the turn's text."""


def _added_special(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content for token in added.values() if token.special}
