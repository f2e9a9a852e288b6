"""Conversations in the words of a reward model: its chat template and its tokens.

prompt and turns ─► the form that the template accepts: calls as objects, as JSON text, or as plain text ─► token ids
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError

from lockstep.utils.untrusted import JSON_ERRORS

Message = dict[str, Any]


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The conversation as text. ValueError if the template refuses it in every form, or leaves out what tools answered."""
    answers = [str(message["content"]).strip() for message in messages if message["role"] == "tool"]
    problem = "it leaves out what tools answered"
    for form in (_calls_as_objects, _as_they_are, as_plain):
        try:
            text: str = tokenizer.apply_chat_template(form(messages), tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            problem = " ".join(str(error).split())
            continue
        if all(answer in text for answer in answers):
            return text
    raise ValueError(
        f"reward_model.model: its chat template cannot render the conversation ({problem}); set "
        "reward_model.model.custom_chat_template"
    )


def token_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    return list(tokenizer(render(tokenizer, messages), add_special_tokens=False)["input_ids"])


def _as_they_are(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _calls_as_objects(messages: Sequence[Message]) -> list[Message]:
    """Arguments of calls, which are JSON text, as objects: most templates write them as JSON themselves."""
    return [_with_calls(message, _parsed) for message in messages]


def _with_calls(message: Message, convert: Callable[[Any], Any]) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": convert(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except JSON_ERRORS:
        return arguments


def as_plain(messages: Sequence[Message]) -> list[Message]:
    """Turns of user and assistant only, one after the other: calls are text of the assistant, the rest is said by the user."""
    plain: list[Message] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        calls = [
            json.dumps(c["function"], ensure_ascii=False) for c in _with_calls(message, _parsed).get("tool_calls") or ()
        ]
        content = "\n".join(filter(None, [str(message.get("content") or ""), *calls]))
        if plain and plain[-1]["role"] == role:
            plain[-1]["content"] = f"{plain[-1]['content']}\n{content}"
        else:
            plain.append({"role": role, "content": content})
    return plain
