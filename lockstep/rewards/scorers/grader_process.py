"""A grader in a sandboxed child process: questions and replies are JSON lines over its pipes.

The child is not trusted: the caller checks every reply, and a child that breaks the protocol, exceeds a limit or dies is replaced.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from lockstep.rewards.sandbox import Sandbox, SandboxedProcess, SandboxError

PACKAGE = "lockstep.rewards.scorers"
START_TIMEOUT_S = 60.0
MAX_REPLY_BYTES = 10_000
READY = b'{"value": []}\n'
# The sandbox does not show the package: the child gets its modules as text, in the first line. Then it answers until stdin closes.
BOOTSTRAP = f"""
import json, os, signal, sys
folder = {PACKAGE.replace(".", "/")!r}
os.makedirs(folder)
for name, source in json.loads(sys.stdin.readline()).items():
    with open(f"{{folder}}/{{name}}.py", "w") as file:
        file.write(source)
sys.path.insert(0, os.getcwd())
from {PACKAGE}.CHILD import prepare, reply_to
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; the child exits when stdin closes
replies, sys.stdout = sys.stdout, sys.stderr
prepare()
reply = {{"value": []}}
while True:
    replies.write(json.dumps(reply) + "\\n")
    replies.flush()
    line = sys.stdin.readline()
    if not line:
        break
    reply = reply_to(json.loads(line))
"""


class ProtocolError(Exception):
    """The child could not answer, or its reply is not one of a grader."""


class GraderProcess:
    """Starts the child on first use and replaces it if it died; one question at a time.

    start: starts a child that is ready for questions.
    """

    def __init__(self, start: Callable[[], SandboxedProcess]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._child: SandboxedProcess | None = None
        self._owner_pid = 0

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Any:
        """`value` of the reply; EOFError, TimeoutError or ProtocolError, after which the child is replaced, if there is none."""
        with self._lock:
            try:
                try:
                    reply = self._ask_child(question, timeout_s)
                except EOFError:  # killed while it was idle, or by this question
                    reply = self._ask_child(question, timeout_s)
                return _value(reply)
            except (EOFError, TimeoutError, ProtocolError):
                self._stop()
                raise

    def _ask_child(self, question: Mapping[str, Any], timeout_s: float) -> bytes:
        child = self._running_child()
        try:
            return exchange(child, question, timeout_s)
        except EOFError as error:
            self._stop()
            raise EOFError(child.error or "it ended") from error

    def _running_child(self) -> SandboxedProcess:
        # After a fork the pipes belong to the parent process.
        if self._child is None or self._owner_pid != os.getpid():
            self._child = self._start()
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


def start_child(sandbox: Sandbox, name: str, bootstrap: str, modules: tuple[str, ...]) -> SandboxedProcess:
    """Start a child, hand it modules of this package and wait until it is ready. name: of the grader, for messages."""
    child = sandbox.start_source(bootstrap)
    sources = {module: (files(PACKAGE) / f"{module}.py").read_text() for module in modules}
    try:
        if exchange(child, sources, START_TIMEOUT_S) == READY:
            return child
        problem = "unexpected output"
    except (EOFError, TimeoutError) as error:
        problem = str(error)
    child.kill()
    raise SandboxError(f"{name} failed to start: {child.error or problem}")


def exchange(child: SandboxedProcess, message: Mapping[str, Any], timeout_s: float) -> bytes:
    """Send one line and return the reply's line; EOFError if the child ended, TimeoutError if it takes too long."""

    def is_complete(reply: bytearray) -> bool:
        return reply.endswith(b"\n") or len(reply) >= MAX_REPLY_BYTES

    try:
        return child.ask(json.dumps(message).encode() + b"\n", timeout_s, is_complete)[:MAX_REPLY_BYTES]
    except TimeoutError:
        raise TimeoutError(f"no reply within {timeout_s:g} s") from None


def _value(line: bytes) -> Any:
    try:
        reply: Any = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict) and isinstance(reply.get("error"), str):
        raise ProtocolError(reply["error"][:500])
    if not isinstance(reply, dict) or "value" not in reply:
        raise ProtocolError(f"unexpected reply {line[:200]!r}")
    return reply["value"]
