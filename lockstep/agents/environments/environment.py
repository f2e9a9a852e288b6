"""Loops whose other side is an environment: it opens the conversation, answers every turn and gives rewards.

    prompt ─► Episode.begin ─► [ the policy's turn ─► Episode.step: reward, next messages, done ] ... ─► Episode.close

Every conversation has its own episode. Rewards of turns are `turn_scores`, their sum is the conversation's reward.
"""

import asyncio
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.agents.conversation import Conversation
from lockstep.agents.loops.agent_loop import AgentLoop, Setup, has_had_its_turns
from lockstep.agents.renderer import Message
from lockstep.agents.tools import calls
from lockstep.agents.tools.calls import ToolError, finite, run_contained
from lockstep.data.images import ImageError
from lockstep.registry import name_from_data
from lockstep.utils.progress import waiting
from lockstep.utils.untrusted import message_of, valid_text

logger = logging.getLogger(__name__)
T = TypeVar("T")

ENV_REMEDY = (
    "put env_class of your own environment into an entry of actor_rollout_ref.rollout.agent.agent_loop_config_path, and its "
    "`name` into the rows' agent_name"
)


class EpisodeError(Exception):
    """The environment failed; it costs its own conversation only."""


@dataclass(frozen=True)
class Step:
    """What follows a turn. messages: for the policy; none if the episode is done."""

    messages: list[Message]
    reward: float
    done: bool


@dataclass
class Calls:
    """Calls of an environment's code, each with a deadline; EpisodeError if one fails. name: of the environment."""

    name: str
    timeout_s: float

    async def in_thread(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call code that may block. The result is awaited if it is a coroutine."""

        async def start() -> Any:
            result = function(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        with _as_episode_error():
            return await run_contained("environment", self.name, start, self.timeout_s)

    async def in_loop(self, result: Awaitable[T]) -> T:
        """Await the answer of an asynchronous client, on this event loop."""
        try:
            with waiting("environment", self.name):
                return await asyncio.wait_for(result, self.timeout_s)
        except TimeoutError as error:
            raise EpisodeError(message_of(error) or f"took longer than {self.timeout_s:g} s") from error
        except Exception as error:
            raise EpisodeError(f"{type(error).__name__}: {message_of(error)}") from error


async def _of_environment(result: Awaitable[T]) -> T:
    """What an episode answers; EpisodeError also if reading what the environment returned fails."""
    try:
        return await result
    except EpisodeError:
        raise
    except Exception as error:
        raise EpisodeError(f"{type(error).__name__}: {message_of(error)}") from error


class Episode(ABC):
    """The environment of one conversation. make: the object that `begin` starts with `_start`."""

    def __init__(self, calls: Calls, make: Callable[[], Any]) -> None:
        self.calls = calls
        self._make = make
        self._env: Any = None

    async def _start(self) -> None:
        self._env = await self.calls.in_thread(self._make)

    @abstractmethod
    async def begin(self, prompt: Sequence[Message]) -> list[Message]:
        """Start; returns the messages that the policy answers first."""

    @abstractmethod
    async def step(self, text: str) -> Step:
        """Answer a turn."""

    async def metrics(self) -> Mapping[str, Any]:
        """Numbers about the finished episode, which the scorer finds besides the reward."""
        return {}

    async def close(self) -> None:
        """Free what the episode holds; called once, also after a failure and if `begin` was not called."""
        if hasattr(self._env, "close"):
            await self.calls.in_thread(self._env.close)


class EnvironmentLoop(AgentLoop):
    """Holds conversations with episodes; `multi_turn.tool_timeout_s` is the deadline of every call."""

    def __init__(self, setup: Setup, **options: Any) -> None:
        super().__init__(setup, **options)
        self._failures: set[str] = set()

    @abstractmethod
    def episode(self, row: Mapping[str, Any]) -> Episode:
        """A new one for a row; ValueError if the row names none."""

    def calls(self, name: str) -> Calls:
        return Calls(name, self.setup.config.tool_timeout_s)

    async def run(self, conversation: Conversation) -> None:
        episode = self.episode(conversation.row)
        try:
            await self._hold(conversation, episode)
            conversation.reward_scores |= await _of_environment(_numbers(episode.metrics()))
            conversation.reward_scores["reward"] = math.fsum(conversation.turn_scores)
        except EpisodeError as error:
            name = conversation.row.get("agent_name") or type(self).__name__
            conversation.fail("environment", f"the environment of {name} failed: {error}")
            self._report(conversation, error)
        finally:
            with suppress(EpisodeError):
                await _of_environment(episode.close())

    async def _hold(self, conversation: Conversation, episode: Episode) -> None:
        prompt = await _of_environment(episode.begin(list(conversation.messages)))
        try:
            fits = conversation.set_prompt(prompt, self.setup.rollout.prompt_length)
        except ImageError as error:
            raise EpisodeError(f"its first messages: {error}") from error
        if not fits:
            raise EpisodeError("its first messages exceed data.max_prompt_length and data.max_response_length")
        while True:
            turn = await conversation.generate()
            if conversation.finish_reason == "abort":
                return
            step = await _of_environment(episode.step(turn.text))
            conversation.turn_scores.append(step.reward)
            if step.done or not turn.ended:
                return
            if has_had_its_turns(conversation, self.setup.config):
                conversation.finish_reason = "turns"
                return
            if not conversation.add(step.messages or [{"role": "user", "content": ""}]):
                return

    def _report(self, conversation: Conversation, error: EpisodeError) -> None:
        """The first failure of each kind; an environment that fails often must not flood the log."""
        kind = str(error).partition(":")[0]
        if kind not in self._failures:
            self._failures.add(kind)
            logger.error("%s (costs its conversation; further ones are only counted)", conversation.failure)


@dataclass(frozen=True)
class RowSettings:
    """What a loop's entry in `agent_loop_config_path` says, and a row overrides: by its columns or in `extra_info`.

    env_class:    the environment: a registered name, `module:Class` or `file.py:Class`. A row may have a registered name only,
                  or repeat that of the entry.
    env_kwargs:   arguments of the class.
    reset_kwargs: arguments of its `reset`.
    """

    env_class: str | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    reset_kwargs: dict[str, Any] = field(default_factory=dict)

    def of_row(self, row: Mapping[str, Any], registered: Collection[str] = ()) -> "RowSettings":
        """ValueError if the row names an environment that is neither `registered` nor the entry's."""
        extra = row.get("extra_info") or {}

        def found(name: str) -> Any:
            return row.get(name) if row.get(name) is not None else extra.get(name)

        name = self.env_class
        if found("env_class"):
            known = {*registered, *filter(None, [self.env_class])}
            name = name_from_data("env_class", found("env_class"), "environment", known, ENV_REMEDY)
        return RowSettings(
            name,
            self.env_kwargs | without_none(found("env_kwargs")),
            self.reset_kwargs | without_none(found("reset_kwargs")),
        )


def without_none(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Parquet gives every row the fields of all rows, with null for absent ones."""
    return {name: value for name, value in (values or {}).items() if value is not None}


def accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def row_seed(row: Mapping[str, Any]) -> int | None:
    """The row's index: all samples of a prompt begin in the same state."""
    index: Any = row.get("index")
    return int(index) if hasattr(index, "__index__") else None


def with_observation(prompt: Sequence[Message], text: str) -> list[Message]:
    """The prompt and the first observation, in one user message because some templates refuse two in a row."""
    messages = [dict(message) for message in prompt]
    if not text:
        return messages
    if messages and messages[-1]["role"] == "user":
        content = messages[-1]["content"]
        part = {"type": "text", "text": f"\n\n{text}"}
        messages[-1]["content"] = [*content, part] if isinstance(content, list) else f"{content}\n\n{text}"
    else:
        messages.append({"role": "user", "content": text})
    return messages


def as_messages(observation: Any) -> list[Message]:
    """What an environment returned for the policy, as user messages: text, or a list of messages."""
    if observation is None or (isinstance(observation, str) and not observation):
        return []
    texts = [item.get("content") if isinstance(item, Mapping) else item for item in _listed(observation)]
    return [{"role": "user", "content": checked_text(text)} for text in texts]


def _listed(observation: Any) -> list[Any]:
    return list(observation) if isinstance(observation, list | tuple) else [observation]


@contextmanager
def _as_episode_error() -> Iterator[None]:
    try:
        yield
    except ToolError as error:
        raise EpisodeError(str(error)) from error


def checked_text(text: Any) -> str:
    """EpisodeError if it is not text."""
    with _as_episode_error():
        return calls.checked_text("the environment", text)


def checked_reward(reward: Any) -> float:
    """EpisodeError if it is not a finite number; None is 0."""
    with _as_episode_error():
        return 0.0 if reward is None else finite(reward)


async def _numbers(metrics: Awaitable[Mapping[str, Any]]) -> dict[str, float]:
    found = await metrics
    return {valid_text(str(name)): float(value) for name, value in found.items() if isinstance(value, int | float)}
