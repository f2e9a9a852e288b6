"""Messages to prompt tokens, by the tokenizer's chat template."""

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]
"""`role` and `content` (text); of an assistant also `tool_calls`, of a tool `tool_call_id`:
{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}."""

_ANSWER = "lockstep-answer-5c1e"
"""Marks the place of an answer in a rendered conversation."""


class ChatRenderer:
    """eos_token_ids: tokens that end an answer."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation up to the next answer."""
        return self.encode(self._render(messages, tools))

    def bridge_ids(
        self, messages: Sequence[Message], at: int, tools: Sequence[dict[str, Any]], last_id: int
    ) -> list[int] | None:
        """The tokens from the end of the sampled answer `messages[at]` to the next answer.

        They do not depend on the text of the answer. last_id: its last token; if it does not end the answer (it was cut), the
        bridge begins with the template's end token. None if the template does not tell where the answer ends.
        """
        for stand_in in _stand_ins(messages[at]):
            text = self._render([*messages[:at], stand_in, *messages[at + 1 :]], tools)
            _, found, rest = text.rpartition(_ANSWER)
            if found:
                break
        else:
            return None
        ids = self.encode(rest)
        end = next((i for i, token in enumerate(ids) if token in self.eos_token_ids), None)
        has_calls = bool(messages[at].get("tool_calls"))
        if end is None or (not has_calls and self.tokenizer.decode(ids[:end]).strip()):
            return None if has_calls else ids  # this template does not end answers with a stop token
        return ids[end + 1 :] if last_id == ids[end] else ids[end:]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        return text


def _stand_ins(answer: Message) -> Iterator[Message]:
    """The answer with the mark in place of its text or, for templates that omit the text of a tool call, of its arguments."""
    yield answer | {"content": _ANSWER}
    if calls := answer.get("tool_calls"):
        last = calls[-1] | {"function": calls[-1]["function"] | {"arguments": {"answer": _ANSWER}}}
        yield answer | {"tool_calls": [*calls[:-1], last]}
