"""`program_agent`: an outside program holds the row's conversation, over HTTP with the policy's endpoint.

row ─► command: JSON on stdin, OPENAI_BASE_URL and ANTHROPIC_BASE_URL of the row's session ─► requests ─► endpoint ─► policy
    ◄─ the session's branches as trajectories, the longest one last; the numbers of the program's last line as rewards

The program needs no change: it speaks one of these protocols and reads its base URL from the environment. Each runs in its own
process group, which is killed when it ends or exceeds its deadline.
"""

import asyncio
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

from lockstep.agents.conversation import Conversation
from lockstep.agents.loops.agent_loop import AgentLoop, Setup, register
from lockstep.agents.loops.recorded import OutOfTimeError, OwnTime, answer_settings, take_branches
from lockstep.agents.renderer import texts_of
from lockstep.config.actor_rollout_ref import ProgramConfig
from lockstep.utils.untrusted import JSON_ERRORS, valid_text

if TYPE_CHECKING:
    from lockstep.agents.endpoint.server import Endpoint

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.agent.program"
TAIL_BYTES = 16384
"""What is read of a program's output, from its end."""
LOGGED_CHARS = 2000


class ProgramError(Exception):
    """The program failed; the message says how."""


@dataclass(frozen=True)
class _Running:
    """slots: for the programs that run at once."""

    endpoint: "Endpoint"
    slots: asyncio.Semaphore


@register("program_agent")
class ProgramAgent(AgentLoop):
    """options: of `ProgramConfig`, for programs other than that of `rollout.agent.program`."""

    def __init__(self, setup: Setup, **options: Any) -> None:
        super().__init__(setup)
        self.config = ProgramConfig(**asdict(setup.rollout.agent.program) | options)
        command = self.config.command
        if not command or not all(isinstance(word, str) for word in command):
            raise ValueError(
                f"program_agent needs {KEY}.command, a list of words such as [python, agent.py]; got {command}"
            )
        if shutil.which(command[0]) is None:
            raise ValueError(f"{KEY}.command={command}: there is no program {command[0]!r}")
        if self.config.timeout_s <= 0 or self.config.max_concurrent < 1:
            raise ValueError(f"{KEY}: timeout_s must be above 0 and max_concurrent at least 1")
        self._running: dict[asyncio.AbstractEventLoop, _Running] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the policy on a free port of loopback; clients need a random token."""
        try:
            from lockstep.agents.endpoint.server import Endpoint, ServerSettings
        except ModuleNotFoundError as error:
            raise ValueError(
                f"program_agent: {error.name} is not installed: pip install 'lockstep-rl[serve]'"
            ) from error
        settings = ServerSettings(token=secrets.token_hex(16), models=("policy", "*"))
        event_loop = asyncio.get_running_loop()
        async with Endpoint(None, self.setup.renderer, None, settings).running() as endpoint:
            self._running[event_loop] = _Running(endpoint, asyncio.Semaphore(self.config.max_concurrent))
            try:
                yield
            finally:
                del self._running[event_loop]
                endpoint.stop_now()

    async def run(self, conversation: Conversation) -> None:
        running = self._running[asyncio.get_running_loop()]
        endpoint = running.endpoint
        async with running.slots:
            own_time = OwnTime(conversation.complete)
            name = self._open_session(endpoint, conversation, own_time)
            try:
                output = await self._run_program(conversation.row, _environment(endpoint, name), own_time)
                conversation.reward_scores |= rewards_of(output)
                error = ""
            except ProgramError as failure:
                error = str(failure)
            finally:
                recorder = endpoint.close_session(name)
        if not recorder.turns:
            error = error or "it made no request that was answered"
        if error:
            conversation.fail("program", f"the program {self.config.command} failed: {error}")
            logger.error("%s", conversation.failure)
        take_branches(conversation, recorder, max_prompt=self.setup.rollout.prompt_length)

    def _open_session(self, endpoint: "Endpoint", conversation: Conversation, own_time: OwnTime) -> str:
        answers = answer_settings(conversation, self.setup.rollout, force_sampling=self.config.force_sampling)
        # Seeds depend on the name, so it must be the same in every run. A greedy sample may have the seed of another one.
        name = f"{conversation.seed:x}{'-greedy' if conversation.sampling.greedy else ''}"
        while endpoint.has_session(name):
            name += "-again"
        trusted = texts_of(conversation.row.get("raw_prompt") or ())
        endpoint.open_session(name, own_time.sample, answers, trusted)
        return name

    async def _run_program(self, row: Mapping[str, Any], environment: dict[str, str], own_time: OwnTime) -> str:
        """The end of the program's output; ProgramError if it fails or exceeds its deadline."""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps(_input_of(row), default=_plain).encode())
            stdin.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.config.command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ProgramError(f"it cannot be started: {error}") from error
            try:
                name = f"{shlex.join(self.config.command)} (pid {process.pid})"
                code = await own_time.limit(process.wait(), self.config.timeout_s, "program", name)
            except OutOfTimeError:
                raise ProgramError(
                    f"it exceeded {KEY}.timeout_s={self.config.timeout_s:g}{_logged(stdout, stderr)}"
                ) from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what the program left behind
                await process.wait()
            if code != 0:
                raise ProgramError(f"exit code {code}{_logged(stdout, stderr)}")
            return _tail(stdout)


def _environment(endpoint: "Endpoint", session: str) -> dict[str, str]:
    """That of this process, with the address of the session."""
    url = f"{endpoint.url}/s/{session}"
    token = endpoint.settings.token or ""
    not_by_proxy = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1")))
    return os.environ | {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": token,
        "NO_PROXY": not_by_proxy,
        "no_proxy": not_by_proxy,
    }


def rewards_of(output: str) -> dict[str, float]:
    """The numbers of the last line: a number is `reward`, a JSON object has one or more by name. Other output has none."""
    lines = output.strip().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except JSON_ERRORS:
        return {}
    values: dict[str, Any] = last if isinstance(last, dict) else {"reward": last}
    return {valid_text(str(name)): float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _input_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the program is told about its row."""
    return {
        "prompt": row.get("raw_prompt") or [],
        "data_source": row.get("data_source"),
        "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        "extra_info": row.get("extra_info") or {},
    }


def _plain(value: Any) -> Any:
    """Arrays and their scalars as lists and numbers; others as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace")


def _logged(stdout: IO[bytes], stderr: IO[bytes]) -> str:
    """The end of what it wrote, for the log."""
    text = (_tail(stderr).strip() or _tail(stdout).strip())[-LOGGED_CHARS:]
    return f"; its output ends with:\n{text}" if text else ""
