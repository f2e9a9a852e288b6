"""A simulated user: another language model, behind an OpenAI-compatible endpoint, writes the user's messages.

the policy's turn ─► system prompt with the row's persona and goal, conversation from the user's side ─► endpoint
                  ◄─ the next user message; the conversation ends with the stop phrase or after `max_turns`
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from lockstep.agents.interactions.interaction import INTERACTIONS, BaseInteraction
from lockstep.registry import check_signature, load_plugin
from lockstep.utils import event_loop
from lockstep.utils.json_http import HttpError, bearer_headers, post_json
from lockstep.utils.message_text import content_text
from lockstep.utils.untrusted import as_plain_text

DEFAULTS: dict[str, Any] = {
    "base_url": None,
    "model": None,
    "system_prompt": None,
    "api_key_env": None,
    "opening": "Hello, how can I help you?",
    "stop_phrase": "[DONE]",
    "max_turns": 8,
    "max_tokens": 256,
    "temperature": 1.0,
    "timeout": 30.0,
    "attempts": 3,
    "score_function": None,
}
SCORE_ARGUMENTS = ("messages", "user_message", "ended", "interaction_kwargs")
REASONING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


@dataclass
class _Conversation:
    kwargs: dict[str, Any]
    num_turns: int = 0


@INTERACTIONS.register("simulated_user")
class SimulatedUser(BaseInteraction):
    """Settings: see docs/agents.md. The API key is read from the environment variable that `api_key_env` names.

    Subclasses may define `score_turn`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if "api_key" in config:
            raise ValueError(
                "api_key does not belong in the config: put it into an environment variable and set api_key_env"
            )
        if unknown := sorted(set(config) - {*DEFAULTS, "name"}):
            raise ValueError(f"simulated_user has no setting {', '.join(unknown)}; known: {', '.join(DEFAULTS)}")
        self.settings = DEFAULTS | self.config
        if missing := [key for key in ("base_url", "model", "system_prompt") if not self.settings[key]]:
            raise ValueError(f"simulated_user needs {', '.join(missing)}")
        if not isinstance(self.settings["stop_phrase"], str) or not self.settings["stop_phrase"]:
            raise ValueError(f"stop_phrase must be text, not {self.settings['stop_phrase']!r}")
        for key in ("max_turns", "max_tokens", "timeout", "attempts"):
            if not isinstance(self.settings[key], int | float) or self.settings[key] <= 0:
                raise ValueError(f"{key} must be a number above 0, not {self.settings[key]!r}")
        self.fields = _fields_of(self.settings["system_prompt"])
        self.headers = bearer_headers(self.settings["api_key_env"], "api_key_env")
        self.score_function = None
        if (reference := self.settings["score_function"]) is not None:
            self.score_function = load_plugin("score_function", reference)
            check_signature(self.score_function, SCORE_ARGUMENTS)
        self._conversations: dict[str, _Conversation] = {}
        try:
            event_loop.run(lambda: self._ask([{"role": "user", "content": "Hello"}], max_tokens=1))
        except HttpError as error:
            raise ValueError(f"base_url={self.settings['base_url']}: {error}") from error

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        given = {name for name, value in kwargs.items() if value is not None}  # parquet has all fields in every row
        if missing := sorted(self.fields - given - {"stop_phrase"}):
            raise ValueError(
                f"interaction_kwargs has no {', '.join(missing)}, which the system_prompt of {self.name} uses"
            )

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.check_kwargs(kwargs)
        instance_id = await super().start_interaction(instance_id)
        self._conversations[instance_id] = _Conversation(kwargs)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        conversation = self._conversations[instance_id]
        text = ""
        ended = conversation.num_turns >= self.settings["max_turns"]
        if not ended:
            conversation.num_turns += 1
            values = {"stop_phrase": self.settings["stop_phrase"], **conversation.kwargs}
            system = {"role": "system", "content": self.settings["system_prompt"].format_map(values)}
            reply = await self._ask([system, *from_the_users_side(messages, self.settings["opening"])])
            text, stop, _ = reply.partition(self.settings["stop_phrase"])
            text, ended = text.strip(), bool(stop) or not text.strip()
        score = await self.score_turn(messages, text, ended, conversation.kwargs)
        return ended, text, float(score), {}

    async def score_turn(
        self, messages: list[dict[str, Any]], user_message: str, ended: bool, interaction_kwargs: dict[str, Any]
    ) -> float:
        """The score of the policy's last turn, to which the user answers with `user_message`."""
        if self.score_function is None:
            return 0.0
        return float(
            self.score_function(
                messages=messages, user_message=user_message, ended=ended, interaction_kwargs=interaction_kwargs
            )
        )

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self._conversations.pop(instance_id or "", None)

    async def _ask(self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None) -> str:
        settings = self.settings
        body = {
            "model": settings["model"],
            "messages": list(messages),
            "max_tokens": max_tokens or settings["max_tokens"],
            "temperature": settings["temperature"],
        }
        url = f"{settings['base_url'].rstrip('/')}/chat/completions"
        answer = await post_json(
            url, body, timeout_s=settings["timeout"], attempts=settings["attempts"], headers=self.headers
        )
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise HttpError(f"{url}: the answer has no choices[0].message.content") from error
        return REASONING.sub("", content or "").strip()


def from_the_users_side(messages: Sequence[Mapping[str, Any]], opening: str) -> list[dict[str, str]]:
    """What the user has seen, with roles swapped: the policy's turns without reasoning and tool calls, and the user's own.

    opening: of the assistant, because conversations of most chat templates begin with the role user.
    """
    swapped = {"assistant": "user", "user": "assistant"}
    seen = [{"role": "user", "content": opening}]
    for message in messages:
        text = as_plain_text(REASONING.sub("", content_text(message.get("content"))).strip())
        if (role := swapped.get(message["role"])) is None or not text:
            continue
        if role == seen[-1]["role"]:
            seen[-1]["content"] += f"\n\n{text}"
        else:
            seen.append({"role": role, "content": text})
    return seen


def _fields_of(template: Any) -> set[str]:
    """The names in braces of a template; ValueError if it has something else there."""
    if not isinstance(template, str):
        raise ValueError(f"system_prompt must be text, not {template!r}")
    try:
        found = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"system_prompt: {error}; write {{{{ and }}}} for braces") from error
    if wrong := sorted(name for name in found if not name.isidentifier()):
        raise ValueError(f"system_prompt: {{{wrong[0]}}} is not a name; write {{{{ and }}}} for braces")
    return found
