"""`gym_agent`: Gymnasium-style text environments, those of skyrl-gym and your own.

    skyrl-gym      init(prompt) -> messages, info        step(text) -> {observations, reward, done, metadata}
    Gymnasium      reset(seed=...) -> observation, info  step(text) -> observation, reward, terminated, truncated, info

A row's `env_class` names an environment of skyrl-gym; the class of your own is in the loop's entry. Its code runs in threads, so it
may block.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.agents.environments.environment import (
    ENV_REMEDY,
    Calls,
    EnvironmentLoop,
    Episode,
    EpisodeError,
    RowSettings,
    Step,
    accepts,
    as_messages,
    checked_reward,
    row_seed,
    with_observation,
)
from lockstep.agents.loops.agent_loop import Setup, register
from lockstep.agents.renderer import Message
from lockstep.registry import did_you_mean, load_plugin

NOT_EXTRAS = ("raw_prompt", "raw_prompt_ids")


@register("gym_agent")
class GymAgent(EnvironmentLoop):
    """options: `env_class`, `env_kwargs` and `reset_kwargs` of rows that have none; `env_config`: for skyrl-gym environments."""

    def __init__(self, setup: Setup, env_config: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(setup)
        self.settings = RowSettings(**options)
        self.env_config = dict(env_config or {})
        self._makers: dict[str, Callable[..., Any]] = {}

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._maker(self.settings.of_row(row, _registered()).env_class)

    def episode(self, row: Mapping[str, Any]) -> Episode:
        settings = self.settings.of_row(row, _registered())
        maker = self._maker(settings.env_class)
        calls = self.calls(str(settings.env_class))
        if _is_skyrl(maker):
            return SkyrlEpisode(calls, maker, self._env_config(), _extras(row, settings))
        return GymEpisode(calls, maker, settings, row_seed(row))

    def _env_config(self) -> Any:
        from omegaconf import OmegaConf

        return OmegaConf.create(self.env_config)

    def _maker(self, name: str | None) -> Callable[..., Any]:
        """The class or function that makes the environment; ValueError if there is none of that name."""
        if not name:
            raise ValueError(f"gym_agent needs the column env_class with an environment of skyrl-gym; or {ENV_REMEDY}")
        if name not in self._makers:
            maker: Callable[..., Any] = load_plugin("env_class", name) if ":" in name else _creator(name)
            if not (_is_skyrl(maker) or callable(getattr(maker, "reset", None)) or not isinstance(maker, type)):
                raise ValueError(f"env_class={name} has neither `init` nor `reset`")
            self._makers[name] = maker
        return self._makers[name]


@functools.cache
def _registered() -> frozenset[str]:
    """The names of skyrl-gym's environments; none if it is not installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        return frozenset()
    from skyrl_gym.envs.registration import registry

    return frozenset(registry)


def _creator(name: str) -> Callable[..., Any]:
    """The class of a skyrl-gym environment."""
    if not _registered():
        raise ValueError(f"env_class={name}: skyrl-gym is not installed: pip install 'lockstep-rl[environments]'")
    from skyrl_gym.envs.registration import load_env_creator, registry

    if name not in registry:
        raise ValueError(f"env_class={name}: skyrl-gym has no such environment. {did_you_mean(name, registry)}")
    entry = registry[name].entry_point
    creator: Callable[..., Any] = load_env_creator(entry) if isinstance(entry, str) else entry
    return creator


def _is_skyrl(maker: Any) -> bool:
    """Environments of skyrl-gym have `init`, those of Gymnasium `reset`."""
    return callable(getattr(maker, "init", None)) and not callable(getattr(maker, "reset", None))


def _extras(row: Mapping[str, Any], settings: RowSettings) -> dict[str, Any]:
    """The row's columns, as skyrl-gym passes them: it calls `reward_model` `reward_spec`."""
    columns = {name: value for name, value in row.items() if name not in NOT_EXTRAS}
    return {"reward_spec": row.get("reward_model") or {}, "extra_info": {}} | columns | settings.env_kwargs


class SkyrlEpisode(Episode):
    def __init__(self, calls: Calls, maker: Callable[..., Any], env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(calls, lambda: maker(env_config=env_config, extras=extras))

    async def begin(self, prompt: Sequence[Message]) -> list[Message]:
        await self._start()
        messages, _ = _tuple(await self.calls.in_thread(self._env.init, list(prompt)), (2,), "init")
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise EpisodeError(f"`init` returned {type(messages).__name__} in place of a list of messages")
        kept = (str, list) if any(isinstance(message.get("content"), list) for message in prompt) else (str,)
        contents = [message.get("content") or "" for message in messages]
        return [
            {**message, "content": content if isinstance(content, kept) else str(content)}
            for message, content in zip(messages, contents)
        ]

    async def step(self, text: str) -> Step:
        output = await self.calls.in_thread(self._env.step, text)
        missing = {"observations", "reward", "done"} - set(output if isinstance(output, Mapping) else ())
        if missing:
            raise EpisodeError(f"`step` must return a dict with observations, reward and done, not {output!r:.100}")
        return Step(as_messages(output["observations"]), checked_reward(output["reward"]), bool(output["done"]))

    async def metrics(self) -> Mapping[str, Any]:
        metrics: Mapping[str, Any] = await self.calls.in_thread(getattr(self._env, "get_metrics", dict)) or {}
        return metrics


class GymEpisode(Episode):
    def __init__(self, calls: Calls, maker: Callable[..., Any], settings: RowSettings, seed: int | None) -> None:
        super().__init__(calls, lambda: maker(**settings.env_kwargs))
        self._reset_kwargs = settings.reset_kwargs
        self._seed = seed

    async def begin(self, prompt: Sequence[Message]) -> list[Message]:
        await self._start()
        seed = {"seed": self._seed} if accepts(self._env.reset, "seed") else {}
        result = await self.calls.in_thread(self._env.reset, **seed | self._reset_kwargs)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        messages = as_messages(result[0] if is_pair else result)
        return with_observation(prompt, "\n\n".join(message["content"] for message in messages))

    async def step(self, text: str) -> Step:
        output = _tuple(await self.calls.in_thread(self._env.step, text), (4, 5), "step")
        done = any(map(bool, output[2:-1]))
        return Step([] if done else as_messages(output[0]), checked_reward(output[1]), done)


def _tuple(result: Any, sizes: tuple[int, ...], method: str) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) not in sizes:
        wanted = " or ".join(map(str, sizes))
        raise EpisodeError(f"`{method}` must return a tuple of {wanted}, not {result!r:.100}")
    return result
