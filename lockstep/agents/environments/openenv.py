"""`openenv_agent`: environments of OpenEnv, behind its client or in this process.

    base_url     ─► client (WebSocket to the environment's server): reset ─► step(action) ... ─► close
    env_class    ─► an `Environment`, the class behind a server, in threads of this process

A turn's text becomes an action, and an observation becomes text. By default they are the field `message` of the action, and the
first text among the usual fields of the observation.
"""

import asyncio
import functools
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lockstep.agents.conversation import Conversation
from lockstep.agents.environments.environment import (
    Calls,
    EnvironmentLoop,
    Episode,
    EpisodeError,
    RowSettings,
    Step,
    accepts,
    checked_reward,
    checked_text,
    row_seed,
    with_observation,
)
from lockstep.agents.loops.agent_loop import Setup, register
from lockstep.agents.renderer import Message
from lockstep.registry import load_plugin, name_from_data

TEXT_FIELDS = ("text", "message", "echoed_message", "prompt", "content", "output", "response", "result", "observation")
"""Fields of an observation that are its text; the first one that has text."""
NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of an observation that the policy does not see."""


@register("openenv_agent")
class OpenEnvAgent(EnvironmentLoop):
    """options, of an entry in `agent_loop_config_path`:

    base_url:       of the environment's server, or a list: a row's `env_kwargs` may choose another one of them.
    client:         the client class as `module:Class`; the default sends and receives dicts.
    env_class:      instead of both, the environment's class, run in this process.
    action:         `module:name` of a function text -> action, or of the action's class; the default is a dict.
    action_field:   the field of the action's class, or of the dict, that the text is put in.
    observation:    `module:name` of a function observation -> text.
    env_kwargs:     further arguments of the client or environment class.
    reset_kwargs:   arguments of `reset`; `seed` is the row's index unless they have one.
    max_concurrent: episodes at once; others wait. A server has a limit, too (`max_concurrent_envs`).
    """

    def __init__(
        self,
        setup: Setup,
        base_url: str | Sequence[str] = (),
        client: str = "openenv.core:GenericEnvClient",
        action: str | None = None,
        action_field: str = "message",
        observation: str | None = None,
        max_concurrent: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(setup)
        if importlib.util.find_spec("openenv") is None:
            raise ValueError("openenv_agent: openenv is not installed: pip install 'lockstep-rl[environments]'")
        if max_concurrent < 1:
            raise ValueError(f"openenv_agent: max_concurrent={max_concurrent} must be at least 1")
        self.settings = RowSettings(**options)
        self.client = client
        self.base_urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self.max_concurrent = max_concurrent
        self.to_action = _action_of(action, action_field)
        self.to_text: Callable[[Any], Any] = text_of if observation is None else load_plugin("observation", observation)
        self._classes: dict[str, type] = {}
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        event_loop = asyncio.get_running_loop()
        self._slots[event_loop] = asyncio.Semaphore(self.max_concurrent)
        try:
            yield
        finally:
            del self._slots[event_loop]

    async def run(self, conversation: Conversation) -> None:
        async with self._slots[asyncio.get_running_loop()]:
            await super().run(conversation)

    def check_row(self, row: Mapping[str, Any]) -> None:
        settings = self.settings.of_row(row)
        if settings.env_class is None and not self._base_url(settings):
            raise ValueError(
                "openenv_agent needs the address of the environment's server: base_url of the loop's entry in "
                "actor_rollout_ref.rollout.agent.agent_loop_config_path; or env_class there to run the environment in this process"
            )
        self._class(settings)

    def episode(self, row: Mapping[str, Any]) -> Episode:
        self.check_row(row)
        settings = self.settings.of_row(row)
        cls = self._class(settings)
        kwargs = dict(settings.env_kwargs)
        if settings.env_class is None:
            kwargs["base_url"] = self._base_url(settings)
        seed = row_seed(row)
        takes_seed = seed is not None and accepts(cls.reset, "seed")  # type: ignore[attr-defined]
        reset_kwargs = ({"seed": seed} if takes_seed else {}) | settings.reset_kwargs
        calls = self.calls(settings.env_class or str(kwargs["base_url"]))
        return OpenEnvEpisode(calls, lambda: cls(**kwargs), reset_kwargs, self.to_action, self.to_text, is_async(cls))

    def _base_url(self, settings: RowSettings) -> str | None:
        """That of the row, if the loop's entry lists it, else the first one."""
        known = [*filter(None, [self.settings.env_kwargs.get("base_url")]), *self.base_urls]
        if (chosen := settings.env_kwargs.get("base_url")) is None:
            return known[0] if known else None
        remedy = (
            "add it to the list base_url of the loop's entry in actor_rollout_ref.rollout.agent.agent_loop_config_path"
        )
        return name_from_data("env_kwargs.base_url", chosen, "server", known, remedy)

    def _class(self, settings: RowSettings) -> type:
        key, name = ("env_class", settings.env_class) if settings.env_class else ("client", self.client)
        assert name is not None
        if name not in self._classes:
            found = load_plugin(key, name, base=object)
            if not (hasattr(found, "reset") and hasattr(found, "step")):
                raise ValueError(f"{key}={name} has no `reset` and `step`")
            self._classes[name] = found
        return self._classes[name]


def is_async(cls: type) -> bool:
    """Whether it is a client that waits on the event loop; others may block."""
    from openenv.core import EnvClient

    return issubclass(cls, EnvClient)


def _action_of(action: str | None, field: str) -> Callable[[str], Any]:
    if action is None:
        return lambda text: {field: text}
    found: Callable[..., Any] = load_plugin("action", action)
    return (lambda text: found(**{field: text})) if isinstance(found, type) else found


def text_of(observation: Any) -> str:
    """Its text: the first of `TEXT_FIELDS` that has some, else what it has as JSON."""
    if isinstance(observation, str):
        return observation
    values = observation if isinstance(observation, Mapping) else _fields(observation)
    for name in TEXT_FIELDS:
        if isinstance(values.get(name), str) and values[name]:
            return str(values[name])
    shown = {name: value for name, value in values.items() if name not in NOT_SHOWN and value not in (None, "", [], {})}
    return json.dumps(shown, default=str, ensure_ascii=False) if shown else ""


def _fields(observation: Any) -> dict[str, Any]:
    dump = getattr(observation, "model_dump", None)
    found: dict[str, Any] = dump() if callable(dump) else vars(observation)
    return found


class OpenEnvEpisode(Episode):
    """make: the client or environment. waits: whether its methods are asynchronous."""

    def __init__(
        self,
        calls: Calls,
        make: Callable[[], Any],
        reset_kwargs: Mapping[str, Any],
        to_action: Callable[[str], Any],
        to_text: Callable[[Any], Any],
        waits: bool,
    ) -> None:
        super().__init__(calls, make)
        self._reset_kwargs = dict(reset_kwargs)
        self._to_action = to_action
        self._to_text = to_text
        self._waits = waits

    async def begin(self, prompt: Sequence[Message]) -> list[Message]:
        await self._start()
        observation, _, _ = _result(await self._call("reset", **self._reset_kwargs))
        return with_observation(prompt, await self._text(observation))

    async def step(self, text: str) -> Step:
        action = await self.calls.in_thread(self._to_action, text)
        observation, reward, done = _result(await self._call("step", action))
        messages = [] if done else [{"role": "user", "content": await self._text(observation)}]
        return Step(messages, checked_reward(reward), done)

    async def close(self) -> None:
        if hasattr(self._env, "close"):
            await self._call("close")

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        function = functools.partial(getattr(self._env, method), *arguments, **options)
        if self._waits:
            return await self.calls.in_loop(function())
        return await self.calls.in_thread(function)

    async def _text(self, observation: Any) -> str:
        return checked_text(await self.calls.in_thread(self._to_text, observation))


def _result(result: Any) -> tuple[Any, Any, bool]:
    """Observation, reward and done: of a client's result, or of an environment's observation, which has them itself."""
    if not hasattr(result, "done"):
        raise EpisodeError(f"`reset` and `step` must return an observation with `done`, not {type(result).__name__}")
    return getattr(result, "observation", result), getattr(result, "reward", None), bool(result.done)
