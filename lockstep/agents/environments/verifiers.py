"""`verifiers_agent`: rollouts of a verifiers environment (0.4 or newer), whose model is the policy in training.

row ─► vf.Env.run_episode, with the URL of the row's session ─► harness ─► requests ─► endpoint ─► policy
    ◄─ the session's longest branch as trajectory; the trace's rewards and metrics

The program of a `program_agent`, in other words, is the package's rollout; `rollout.agent.program` has the settings of both
(`timeout_s`, `max_concurrent`, `force_sampling`). Rollouts run in one thread with its own event loop, so code that blocks holds up
no other agent.
"""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from lockstep.agents.loops.agent_loop import AgentLoop, Setup, register
from lockstep.agents.loops.program_agent import KEY, ProgramAgent, ProgramError
from lockstep.agents.loops.recorded import OutOfTimeError, OwnTime
from lockstep.config.actor_rollout_ref import ProgramConfig
from lockstep.data.verifiers_tasks import config_of, make_env, task_of
from lockstep.registry import name_from_data
from lockstep.utils.generated_data import is_generated, parse_generated
from lockstep.utils.untrusted import message_of

STOP_S = 10.0


@register("verifiers_agent")
class VerifiersAgent(ProgramAgent):
    """options: of `ProgramConfig`, without `command`."""

    def __init__(self, setup: Setup, **options: Any) -> None:
        AgentLoop.__init__(self, setup)
        settings = asdict(setup.rollout.agent.program) | options
        self.config = ProgramConfig(**settings | {"command": ["verifiers"]})
        if self.config.timeout_s <= 0 or self.config.max_concurrent < 1:
            raise ValueError(f"{KEY}: timeout_s must be above 0 and max_concurrent at least 1")
        self._running = {}
        self._threads: dict[asyncio.AbstractEventLoop, _LoopThread] = {}

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._task(row)

    def _task(self, row: Mapping[str, Any]) -> tuple[str, int]:
        """The data entry that the row was made from, and the number of its task; ValueError if the config has no such entry."""
        place = (row.get("extra_info") or {}).get("verifiers")
        if not isinstance(place, Mapping) or "index" not in place:
            raise ValueError("verifiers_agent answers rows of data.train_files=verifiers:TASKSET only")
        known = [str(entry) for entry in self.setup.data_files if is_generated(entry)]
        remedy = "add it to data.train_files or data.val_files"
        entry = name_from_data("extra_info.verifiers.entry", place.get("entry"), "taskset", known, remedy)
        return entry, int(place["index"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        event_loop = asyncio.get_running_loop()
        async with super().running():
            token = self._running[event_loop].endpoint.settings.token or ""
            os.environ[_key_variable(token)] = token
            thread = self._threads[event_loop] = _LoopThread()
            try:
                yield
            finally:
                del self._threads[event_loop], os.environ[_key_variable(token)]
                await asyncio.to_thread(thread.stop)

    async def _run_program(self, row: Mapping[str, Any], environment: dict[str, str], own_time: OwnTime) -> str:
        """One episode; returns its rewards and metrics as a JSON object."""
        entry, index = self._task(row)
        data = parse_generated(entry)
        address, token = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
        rollout = _episode(config_of(data.name, data.options), index, address, token)
        running = asyncio.run_coroutine_threadsafe(rollout, self._threads[asyncio.get_running_loop()].loop)
        try:
            episode = asyncio.wrap_future(running)
            return json.dumps(await own_time.limit(episode, self.config.timeout_s, "environment", entry))
        except OutOfTimeError:
            raise ProgramError(f"it exceeded {KEY}.timeout_s={self.config.timeout_s:g}") from None
        except ProgramError:
            raise
        except Exception as error:  # the user's environment
            raise ProgramError(f"{type(error).__name__}: {message_of(error)}") from error


def _key_variable(token: str) -> str:
    """The package reads keys from the environment, and hides names with API_KEY from the programs that it starts."""
    return f"LOCKSTEP_{token[:8].upper()}_API_KEY"


async def _episode(config: dict[str, Any], index: int, address: str, token: str) -> dict[str, float]:
    """Run one episode in an environment of its own; ProgramError if it gives no reward."""
    import verifiers.v1 as vf

    client = vf.EvalClientConfig(base_url=address, api_key_var=_key_variable(token))
    env = make_env(config)
    async with env.serving():
        episode = await env.run_episode(task_of(config, index), vf.ModelContext("policy", client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if len(episode.traces) > 1:
        raise ProgramError(
            f"{config['taskset']['id']} held {len(episode.traces)} conversations for one task; only one is supported"
        )
    trace = episode.traces[0] if episode.traces else None
    if trace is None or not trace.rewards or None in trace.rewards.values():
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it recorded no reward"
        raise ProgramError(f"task {index} of {config['taskset']['id']}: {last}")
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **rewards, "reward": trace.reward}


class _LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="verifiers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def stop(self) -> None:
        """Cancel what still runs. A thread that blocks is left behind."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_S)
