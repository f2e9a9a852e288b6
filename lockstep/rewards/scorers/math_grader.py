r"""Mathematical equality in a sandboxed child process, so that no answer can harm or block the trainer.

sympy keeps a process busy for hours on some answers, and its time limits (SIGALRM) work in a main thread only. So questions
go to a child (`math_grader_child`) without environment, network, files of the user and the Lockstep package, and with
limits on memory and time:

    MathGrader.ask --{"task", "gold", "answer", ...} line--> child --{"value": [bool, ...]} or {"error": str} line--> verdicts

Lines are JSON. The child is not trusted: only booleans are read from it, and a child that breaks the protocol, exceeds a
limit or dies is replaced; the answer then counts as wrong.
"""

import atexit
import functools
import json
import logging
import os
import selectors
import threading
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from lockstep.rewards.sandbox import Limits, Sandbox, SandboxedProcess, SandboxError, isolation
from lockstep.rewards.sandbox.process import VARIABLE

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 3
"""Limit for one parse or comparison in the child."""
REPLY_TIMEOUT_S = 20.0
"""After this time the child counts as stuck, for example in a long computation in C that ignores its own limits."""
MAX_REPLY_BYTES = 10_000
MAX_ANSWER_CHARS = 10_000
"""Longer answers are wrong; a whole solution, in which math-verify searches for the answer, may be longer."""
LIMITS = Limits(cpu_s=None, wall_s=None, memory_mb=2048, file_mb=16, processes=4, open_files=64)

PACKAGE = "lockstep.rewards.scorers"
READY = b'{"value": []}\n'
MODULES = ("expression", "latex", "latex_text", "symbolic", "math_grader_child")
# The sandbox does not show the package: the child gets its modules as text, in the first line.
BOOTSTRAP = f"""
import json, os, sys
folder = {PACKAGE.replace(".", "/")!r}
os.makedirs(folder)
for name, source in json.loads(sys.stdin.readline()).items():
    with open(f"{{folder}}/{{name}}.py", "w") as file:
        file.write(source)
sys.path.insert(0, os.getcwd())
from {PACKAGE}.math_grader_child import serve
serve()
"""


class Agreement(NamedTuple):
    """strict: equal as text or as sympy expressions; within_tolerance: also as numbers within 1e-4."""

    strict: bool
    within_tolerance: bool


Task = Literal["equal", "found", "agreement"]
NUM_VERDICTS: dict[Task, int] = {"equal": 1, "found": 1, "agreement": 2}


class ProtocolError(Exception):
    """The child could not answer, or its reply is not one of a grader."""


class MathGrader:
    """Starts the child on first use and replaces it if it died; one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: SandboxedProcess | None = None
        self._owner_pid = 0

    def is_equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds `answer` equal to `gold`; False on timeout."""
        return self.ask("equal", gold, answer) == [True]

    def is_found(self, gold: str, text: str) -> bool:
        """Whether the answer that math-verify extracts from a whole text equals `gold`."""
        return self.ask("found", gold, text) == [True]

    def agreement(self, gold: str, answer: str) -> Agreement:
        """Compare `answer` with `gold` by the rules of `lockstep.rewards.scorers.symbolic`."""
        if len(answer) > MAX_ANSWER_CHARS:
            return Agreement(False, False)
        return Agreement(*(self.ask("agreement", gold, answer) or (False, False)))

    def ask(self, task: Task, gold: str, answer: str) -> list[bool] | None:
        """The child's verdicts; None, with a warning, if it gave none."""
        question: dict[str, str | int] = {"task": task, "gold": gold, "answer": answer, "timeout_s": STEP_TIMEOUT_S}
        with self._lock:
            try:
                try:
                    reply = self._ask_child(question)
                except EOFError:  # killed while it was idle, or by this answer
                    reply = self._ask_child(question)
                return _verdicts(reply, NUM_VERDICTS[task])
            except (EOFError, TimeoutError, ProtocolError) as error:
                self._stop()
                logger.warning("the math grader failed on %.200r: %s; the answer counts as wrong", answer, error)
                return None

    def _ask_child(self, question: dict[str, str | int]) -> bytes:
        child = self._running_child()
        try:
            return _exchange(child, question, REPLY_TIMEOUT_S)
        except EOFError as error:
            self._stop()
            raise EOFError(child.error or "it ended") from error

    def _running_child(self) -> SandboxedProcess:
        # After a fork the pipes belong to the parent process.
        if self._child is None or self._owner_pid != os.getpid():
            self._child = _start()
            self._owner_pid = os.getpid()
        return self._child

    def _stop(self) -> None:
        if self._child is not None and self._owner_pid == os.getpid():
            self._child.kill()
        self._child = None

    def close(self) -> None:
        """Stop the child; the next question starts it again."""
        with self._lock:
            self._stop()


def _start() -> SandboxedProcess:
    """Start a child and wait until it has imported sympy."""
    child = _sandbox().start_source(BOOTSTRAP)
    sources = {name: (files(PACKAGE) / f"{name}.py").read_text() for name in MODULES}
    try:
        if _exchange(child, sources, START_TIMEOUT_S) == READY:
            return child
        problem = "unexpected output"
    except (EOFError, TimeoutError) as error:
        problem = str(error)
    child.kill()
    raise SandboxError(f"the math grader failed to start: {child.error or problem}")


@functools.cache
def _sandbox() -> Sandbox:
    if os.environ.get(VARIABLE, "auto") == "auto" and isolation() == "none":
        logger.warning(
            "No sandbox works on this machine: the math grader, which parses answers without running them, is only limited "
            "in time, memory and system calls"
        )
        return Sandbox(LIMITS, form="none")
    return Sandbox(LIMITS)


def _exchange(child: SandboxedProcess, message: Mapping[str, str | int], timeout_s: float) -> bytes:
    """Send one line and return the reply's line; EOFError if the child ended, TimeoutError if it takes too long."""
    unsent, reply = memoryview(json.dumps(message).encode() + b"\n"), b""
    deadline = time.monotonic() + timeout_s
    os.set_blocking(child.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while not reply.endswith(b"\n") and len(reply) < MAX_REPLY_BYTES:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError(f"no reply within {timeout_s:g} s")
            for key, _ in ready:
                if key.fileobj is child.stdout:
                    chunk = os.read(child.stdout.fileno(), MAX_REPLY_BYTES)
                    if not chunk:
                        raise EOFError("it ended")
                    reply += chunk
                elif unsent:
                    try:
                        unsent = unsent[os.write(child.stdin.fileno(), unsent) :]
                    except BrokenPipeError as error:
                        raise EOFError("it ended") from error
                else:
                    selector.unregister(child.stdin)
    return reply


def _verdicts(line: bytes, num_verdicts: int) -> list[bool]:
    try:
        reply: Any = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict) and isinstance(reply.get("error"), str):
        raise ProtocolError(reply["error"][:500])
    verdicts = reply.get("value") if isinstance(reply, dict) else None
    if not isinstance(verdicts, list) or [type(verdict) for verdict in verdicts] != [bool] * num_verdicts:
        raise ProtocolError(f"unexpected reply {line[:200]!r}")
    return verdicts


GRADER = MathGrader()
"""The grader of this process."""
atexit.register(GRADER.close)
