"""Calls of tools: a deadline on each, and every failure contained as a message to the policy."""

import asyncio
import json
import logging
import math
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lockstep.agents.schemas import ToolResponse
from lockstep.agents.tool_parser import FunctionCall
from lockstep.agents.tools.threads import run_in_thread
from lockstep.agents.tools.tool import BaseTool
from lockstep.config.actor_rollout_ref import MultiTurnConfig
from lockstep.data.images import ImageError, data_uri, read_image
from lockstep.utils.progress import WaitKind, waiting
from lockstep.utils.untrusted import JSON_ERRORS, is_valid, message_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
TruncateSide = Literal["left", "middle", "right"]

MAX_CHOSEN_CHARS = 100_000
"""Limit of a message that a tool chose itself; `CallLimits` cut it further."""
PACKAGE = str(Path(__file__).parents[2])
TRIVIAL = (BaseTool.create, BaseTool.calc_reward, BaseTool.release)
"""Methods that need no thread and no deadline: those that a tool did not override."""
_logged: set[tuple[str, str]] = set()


class ToolError(Exception):
    """A call failed; the message is for the policy. A tool may raise it to choose the message."""


@dataclass(frozen=True)
class CallLimits:
    """timeout_s: of one call. max_chars: of a response; `side` is the part of a longer one that is kept."""

    timeout_s: float = 30.0
    max_chars: int = 256
    side: TruncateSide = "middle"

    @classmethod
    def of(cls, config: MultiTurnConfig) -> "CallLimits":
        return cls(config.tool_timeout_s, config.max_tool_response_length, config.tool_response_truncate_side)


@dataclass(frozen=True)
class CallResult:
    """text, images (as data URIs): for the policy. failed: "malformed" if there was nothing to call, "error" if the tool failed."""

    name: str
    text: str
    failed: Literal["", "malformed", "error"] = ""
    reward: float | None = None
    images: tuple[str, ...] = ()


class ToolSession:
    """The tools of one conversation."""

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        tools_kwargs: Mapping[str, Any],
        limits: CallLimits,
        instance_id: str,
        row: Mapping[str, Any],
        *,
        takes_images: bool = False,
    ) -> None:
        """tools_kwargs: arguments of the tools' methods, by tool. row: for tools that take arguments from it.
        takes_images: whether a result may have images.
        """
        self._takes_images = takes_images
        self.tools = tools
        self.limits = limits
        self.instance_id = instance_id
        self._kwargs = tools_kwargs
        self._row = row
        self._created: dict[str, str] = {}
        """Tool name to instance id."""
        self._creating = asyncio.Lock()

    async def call(self, call: FunctionCall) -> CallResult:
        """Answer one call; never raises, except if the conversation itself is cancelled."""
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools)
            return self._failed(call, f"there is no tool {call.name!r}; tools: {known}", "malformed")
        try:
            parameters = json.loads(call.arguments)
        except JSON_ERRORS as error:
            return self._failed(call, f"the arguments are not valid JSON: {message_of(error)}", "malformed")
        if not isinstance(parameters, dict):
            return self._failed(call, "the arguments must be a JSON object", "malformed")
        try:
            instance_id = await self._instance(tool)
            text, images, reward = await self._run(
                tool, tool.execute, self._outcome_of, instance_id, parameters, **self._arguments(tool, "execute_kwargs")
            )
        except ToolError as error:
            return self._failed(call, str(error), "error")
        return CallResult(call.name, text, reward=reward, images=images)

    def _failed(self, call: FunctionCall, message: str, how: Literal["malformed", "error"]) -> CallResult:
        return CallResult(call.name, truncate(f"Error: {message}", self.limits), how)

    def _outcome_of(self, result: Any) -> tuple[str, tuple[str, ...], float | None]:
        """Text, images and reward of what `execute` returned; ToolError if it is something else."""
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], ToolResponse):
            raise ToolError(f"the tool returned {type(result).__name__}, not (ToolResponse, reward, metrics)")
        response, reward, _ = result
        if response.video:
            raise ToolError("the tool returned a video; text and images are supported")
        if response.image and not self._takes_images:
            raise ToolError("the tool returned an image; the model reads only text here")
        try:
            images = tuple(data_uri(read_image(image)) for image in response.image or ())
        except ImageError as error:
            raise ToolError(f"an image of the tool {error}") from error
        text = checked_text("the tool", "" if response.text is None else response.text, self.limits)
        return text, images, None if reward is None else finite(reward)

    async def close(self) -> dict[str, float | None]:
        """The rewards of the tools that were called, None for those that failed, and release them."""
        rewards: dict[str, float | None] = {}
        for name, instance_id in self._created.items():
            tool = self.tools[name]
            rewards[name] = None
            with suppress(ToolError):  # logged
                reward_kwargs = self._arguments(tool, "calc_reward_kwargs")
                rewards[name] = await self._run(tool, tool.calc_reward, finite, instance_id, **reward_kwargs)
        await self.release()
        return rewards

    async def release(self) -> None:
        """Release the tools that were called; no-op if they are released already."""
        for name, instance_id in self._created.items():
            await self._release(self.tools[name], instance_id)
        self._created = {}

    async def _release(self, tool: BaseTool, instance_id: str) -> None:
        with suppress(ToolError):  # logged
            await self._run(tool, tool.release, _as_it_is, instance_id, **self._arguments(tool, "release_kwargs"))

    async def _instance(self, tool: BaseTool) -> str:
        async with self._creating:  # calls of one turn run at the same time
            if tool.name not in self._created:
                create_kwargs = tool.create_arguments(self._row) | self._arguments(tool, "create_kwargs")
                created = await self._run(tool, tool.create, _as_it_is, self.instance_id, **create_kwargs)
                self._created[tool.name] = created[0] if isinstance(created, tuple) else created
        return self._created[tool.name]

    def _arguments(self, tool: BaseTool, name: str) -> dict[str, Any]:
        return dict((self._kwargs.get(tool.name) or {}).get(name) or {})

    async def _run(
        self,
        tool: BaseTool,
        method: Callable[..., Coroutine[Any, Any, Any]],
        read: Callable[[Any], T],
        /,
        *arguments: Any,
        **options: Any,
    ) -> T:
        """What `read` makes of the result; ToolError if either fails."""
        if getattr(method, "__func__", None) in TRIVIAL:
            return read(await method(*arguments))  # the row's options have no reader

        async def start() -> T:
            return read(await method(*arguments, **options))

        step = "" if method == tool.execute else method.__name__
        return await run_contained("tool", tool.label, start, self.limits.timeout_s, step)


async def run_contained(
    kind: WaitKind, name: str, start: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, step: str = ""
) -> T:
    """Run a user's coroutine under a deadline; ToolError if it fails in any way.

    kind, name: whose coroutine it is. step: which one, if it is not the main one.
    """
    what = f"{step} of {kind} {name}" if step else f"{kind} {name}"
    try:
        with waiting(kind, f"{name}, {step}" if step else name) as wait:

            async def begin() -> T:
                wait.began = time.monotonic()  # it may have waited for a thread
                return await start()

            return await run_in_thread(begin, timeout_s)
    except ToolError as error:
        chosen = ToolError(message_of(error, MAX_CHOSEN_CHARS))
        _log_once(what, chosen)
        raise chosen from error
    except TimeoutError as error:
        late = TimeoutError(message_of(error) or f"took longer than {timeout_s:g} s")
        _log_once(what, late)
        raise ToolError(str(late)) from error
    except Exception as error:
        _log_once(what, error)
        raise ToolError(f"{type(error).__name__}: {message_of(error)}") from error


def _as_it_is(result: Any) -> Any:
    return result


def checked_text(what: str, text: Any, limits: CallLimits | None = None) -> str:
    """What a user's code returned, cut to the limits; ToolError if it cannot be rendered."""
    if not isinstance(text, str):
        raise ToolError(f"{what} returned {type(text).__name__}, not text")
    if limits is not None:
        text = truncate(text, limits)
    if "\0" in text or not is_valid(text):
        raise ToolError(f"{what} returned binary data, not text")
    return text


def finite(reward: Any) -> float:
    """ToolError if it is not a finite number."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ToolError(f"the reward is {reward!r:.80}, not a finite number")
    return value


def truncate(text: str, limits: CallLimits) -> str:
    """At most `max_chars` characters of `text`, and a note if it was longer."""
    size = limits.max_chars
    if len(text) <= size:
        return text
    if limits.side == "left":
        return text[:size] + "...(truncated)"
    if limits.side == "right":
        return "(truncated)..." + text[-size:]
    half = size // 2
    return text[:half] + "...(truncated)..." + text[-half:]


def _log_once(name: str, error: Exception) -> None:
    """The first error of each kind, with the frames of the user's code; the log must not be flooded."""
    kind = (name, type(error).__name__)
    if kind in _logged:
        return
    _logged.add(kind)
    is_message = isinstance(error, ToolError | TimeoutError)
    what = str(error) if is_message else f"{type(error).__name__}: {message_of(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if frame.filename.startswith(PACKAGE)]
    theirs = frames[ours[-1] + 1 :] if ours else frames
    shown = "" if is_message else "".join(traceback.format_list(theirs)).rstrip()
    logger.warning("%s failed: %s (further ones are only counted)%s", name, what, shown and f"\n{shown}")


def by_name(tools: Sequence[BaseTool]) -> dict[str, BaseTool]:
    """ValueError if two tools have the same name."""
    named: dict[str, BaseTool] = {}
    for tool in tools:
        if tool.name in named:
            raise ValueError(f"two tools are named {tool.name!r}; names must be unique")
        named[tool.name] = tool
    return named
