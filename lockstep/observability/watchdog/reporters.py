"""The controller's side of `utils/heartbeat.py`: the processes that report, and their stacks on request."""

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from lockstep.utils import heartbeat
from lockstep.utils.heartbeat import MAX_MESSAGE_BYTES, Link, ProcessState, Stack

logger = logging.getLogger(__name__)

DUMP_TIMEOUT_S = 10.0
"""How long a process may take to send its stacks."""
PY_SPY_TIMEOUT_S = 20.0
REPLACED_S = 5.0
"""A process that was not heard for longer is gone, if another one takes its role and rank."""
ACCEPT_RETRY_S = 1.0
"""Pause after a connection could not be accepted, such as for lack of file descriptors."""


@dataclass(eq=False)
class Reporter:
    """A process with a connection. heard: when its last message came."""

    connection: Connection
    state: ProcessState
    heard: float
    _answer: dict[str, Any] = field(default_factory=dict)
    _answered: threading.Event = field(default_factory=threading.Event)
    _asked_for: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Its answer; empty if there is none in time. One request at a time."""
        with self._lock:
            self._answered.clear()
            self._answer, self._asked_for = {}, request.get("pid")
            try:
                self.connection.send_bytes(json.dumps(request).encode())
            except OSError:
                return {}
            self._answered.wait(timeout_s)
            return self._answer

    def answer(self, content: dict[str, Any]) -> None:
        """A message that is no state; a late answer to another request is ignored."""
        if content.get("stacks_of") == self._asked_for:
            self._answer = content
            self._answered.set()

    @property
    def key(self) -> tuple[str, int]:
        return self.state.machine, self.state.pid

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine, with the pid that it says."""
        return self.state.machine == heartbeat.machine()


@dataclass(frozen=True)
class Dump:
    """What a process does, in detail.

    stacks:     empty if it gave none.
    answers:    False if it did not send them itself.
    is_stopped: by a signal.
    native:     py-spy's output, if py-spy is installed.
    awaited:    stacks of processes that it waits for and that do not report, as faulthandler writes them, by the name of the wait.
    """

    stacks: list[Stack] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    answers: bool = True
    is_stopped: bool = False
    native: str = ""
    awaited: dict[str, str] = field(default_factory=dict)


class Reporters:
    """Context manager: listens for the processes of a run. host: the address that they can reach."""

    def __init__(self, host: str) -> None:
        key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.link = Link(host, self._listener.getsockname()[1], key)
        self._reporters: dict[tuple[str, int], Reporter] = {}
        self._is_closed = False

    def __enter__(self) -> "Reporters":
        threading.Thread(target=self._accept, name="watchdog-accept", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_closed = True
        with suppress(OSError), socket.create_connection((self.link.host, self.link.port), timeout=1.0):
            pass  # wakes `accept`
        self._listener.close()
        for reporter in list(self._reporters.values()):
            reporter.connection.close()

    def all(self) -> list[Reporter]:
        """The processes that report, by role and rank."""
        return sorted(self._reporters.copy().values(), key=lambda r: (r.state.role, r.state.rank, r.state.pid))

    def forget_ended(self) -> None:
        """Drop processes of this machine that are gone although a child of theirs holds the connection."""
        for reporter in self.all():
            if reporter.is_here and not heartbeat.is_alive(reporter.state.pid):
                self._reporters.pop(reporter.key, None)

    def forgive(self, seconds: float) -> None:
        """This process was stopped for as long: silence during that time does not count."""
        for reporter in self.all():
            reporter.heard += seconds

    def dumps(self, silent_s: float) -> dict[Reporter, Dump]:
        """Of all processes, at the same time. silent_s: who was not heard for longer is asked by a signal at once."""
        found = {reporter: Dump(answers=False) for reporter in self.all()}
        threads = [threading.Thread(target=self._dump, args=(r, silent_s, found), daemon=True) for r in found]
        for thread in threads:
            thread.start()
        end = time.monotonic() + DUMP_TIMEOUT_S + PY_SPY_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return dict(found)

    def kill(self, process: ProcessState) -> None:
        """End a process that does not answer."""
        reporter = self._reporters.get((process.machine, process.pid))
        if reporter is None:
            return
        if reporter.is_here:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        elif (peer := self._peer(reporter)) is not None:
            with suppress(OSError):
                request = {"request": heartbeat.KILL, "pid": process.pid}
                peer.connection.send_bytes(json.dumps(request).encode())

    def _dump(self, reporter: Reporter, silent_s: float, found: dict[Reporter, Dump]) -> None:
        is_silent = time.monotonic() - reporter.heard > silent_s
        is_silent |= reporter.is_here and heartbeat.is_stopped(reporter.state.pid)
        answer = {} if is_silent else reporter.ask({"request": heartbeat.DUMP}, DUMP_TIMEOUT_S)
        answers = "stacks" in answer
        if not answers:
            answer = self._signalled(reporter)
        stacks = [Stack.from_json(stack) for stack in answer.get("stacks", [])]
        native = py_spy(reporter.state.pid) if reporter.is_here else ""
        is_stopped, awaited = bool(answer.get("is_stopped")), answer.get("awaited", {})
        found[reporter] = Dump(stacks, answer.get("spans", []), answers, is_stopped, native, awaited)

    def _signalled(self, reporter: Reporter) -> dict[str, Any]:
        """By a signal to the process: of this one, or of a peer on its machine."""
        state = reporter.state
        if not reporter.is_here:
            request = {"request": heartbeat.SIGNAL, "pid": state.pid, "stack_file": state.stack_file}
            peer = self._peer(reporter)
            return {} if peer is None else peer.ask(request, DUMP_TIMEOUT_S + heartbeat.SIGNAL_TIMEOUT_S)
        is_stopped = heartbeat.is_stopped(state.pid)
        stacks = [] if is_stopped else heartbeat.signalled_stacks(state.pid, state.stack_file)
        return {"stacks": [vars(stack) for stack in stacks], "is_stopped": is_stopped}

    def _peer(self, reporter: Reporter) -> Reporter | None:
        """The process of the same machine that was heard last."""
        peers = [
            other for other in self.all() if other is not reporter and other.state.machine == reporter.state.machine
        ]
        return max(peers, key=lambda peer: peer.heard, default=None)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                made, _ = self._listener.accept()
                threading.Thread(target=self._begin, args=(made,), name="watchdog-reporter", daemon=True).start()
            except (OSError, RuntimeError):  # no more file descriptors or threads
                time.sleep(ACCEPT_RETRY_S)

    def _begin(self, made: socket.socket) -> None:
        with suppress(*heartbeat.CONNECTION_ERRORS), made:
            connection = heartbeat.as_connection(made)
            with connection:
                with heartbeat.timed(made):
                    deliver_challenge(connection, self.link.key)
                    answer_challenge(connection, self.link.key)
                made.close()
                self._serve(connection)

    def _add(self, reporter: Reporter) -> None:
        """A process that reports for the first time; it takes the place of one whose machine was lost."""
        role_and_rank = reporter.state.role, reporter.state.rank
        for other in self.all():
            is_gone = reporter.heard - other.heard > REPLACED_S
            if is_gone and (other.state.role, other.state.rank) == role_and_rank:
                self._reporters.pop(other.key, None)
        self._reporters[reporter.key] = reporter

    def _serve(self, connection: Connection) -> None:
        reporter: Reporter | None = None
        try:
            while True:
                content = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
                now = time.monotonic()
                if "state" not in content:
                    assert reporter is not None
                    reporter.answer(content)
                elif reporter is None:
                    reporter = Reporter(connection, ProcessState.from_json(content["state"]), now)
                    self._add(reporter)
                else:
                    reporter.state = ProcessState.from_json(content["state"])
                if reporter is not None:
                    reporter.heard = now
        except (OSError, EOFError):  # the process has ended
            pass
        except Exception as error:  # noqa: BLE001 - a process of another version
            logger.debug("a report was not understood: %r", error)
        finally:
            if reporter is not None and self._reporters.get(reporter.key) is reporter:
                del self._reporters[reporter.key]


def py_spy(pid: int) -> str:
    """Python and native stacks of a process of this machine; empty if py-spy is not installed or not allowed."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    for options in (["--native"], []):
        with suppress(subprocess.SubprocessError, OSError):
            command = [program, "dump", "--nonblocking", "--pid", str(pid), *options]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S / 2, check=False)
            if done.returncode == 0:
                return done.stdout
    return ""
