"""What a process of a run says about itself, and the thread that sends it to the run's controller. Imports no torch.

    worker process                                             controller (`observability/watchdog/reporters.py`)
    state: role, rank, phases, waits, calls, memory ─────────► about once per second
                                                    ◄───────── DUMP
    stacks of all threads, last spans ───────────────────────►
                                                    ◄───────── SIGNAL, PID: ask a silent process of the same machine
    what its faulthandler wrote ─────────────────────────────►

Messages are JSON. The thread answers while other threads wait, or compute without the interpreter's lock. A process that does not
answer may still write its stacks, by the handler of a signal.
"""

import faulthandler
import functools
import json
import os
import re
import signal
import socket
import struct
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from lockstep.utils import progress, spans

INTERVAL_S = 1.0
"""Between two reports."""
DUMP, SIGNAL, KILL = "dump", "signal", "kill"
"""Requests of the controller."""
STACK_SIGNAL = signal.SIGUSR2
SIGNAL_TIMEOUT_S = 2.0
"""How long a signalled process may take to write its stacks."""
MAX_MESSAGE_BYTES = 8 << 20
MAX_WAITS = 20
"""Waits of one kind that are reported: the longest."""
MAX_ATTEMPTS = 5
"""Connections in a row that may fail."""
CONNECT_TIMEOUT_S = 30.0
RECONNECT_S = 5.0
CONNECTION_ERRORS = (OSError, EOFError, ValueError, AuthenticationError, AssertionError)
"""The other process or the network has ended, or a stranger is at the port."""

POLLS = frozenset({"advance_generation"})
"""Calls of workers that are repeated while nothing happens: their end is no sign of progress."""
DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/", "/bin/debugpy")
_STDLIB = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) (?P<id>0x[0-9a-f]+)")

Frame = tuple[str, int, str]
"""File, line, function."""


@dataclass(frozen=True)
class PhaseState:
    """`progress.Phase`. began: by the process's monotonic clock."""

    name: str
    began: float
    done: int = 0
    total: int | None = None
    unit: str = ""

    def __str__(self) -> str:
        return self.name if self.total is None else f"{self.name} {self.done}/{self.total} {self.unit}".rstrip()


@dataclass(frozen=True)
class WaitState:
    """`progress.Wait`."""

    kind: str
    name: str
    began: float
    thread: int = 0


@dataclass(frozen=True)
class ProcessState:
    """
    machine:     processes with the same one see each other's pids.
    phases:      of each thread that has any, outermost first.
    waits:       what it waits for, longest first: at most MAX_WAITS of a kind.
    num_waits:   of all kinds.
    waits_sign:  changes when a wait begins or ends, except for files and PASSIVE ones.
    calls:       calls of workers that run in it, as "role.method".
    last_call:   the one that ended last.
    num_moves:   grows with every sign of progress that phases and calls do not show.
    rss:         resident memory in bytes.
    now:         its monotonic clock; `began` of phases and waits are by the same.
    stack_file:  what its faulthandler writes to, for processes of the same machine; empty if it has none.
    """

    role: str
    rank: int
    pid: int
    host: str
    machine: str = ""
    now: float = 0.0
    phases: list[list[PhaseState]] = field(default_factory=list)
    waits: list[WaitState] = field(default_factory=list)
    num_waits: int = 0
    waits_sign: int = 0
    calls: list[str] = field(default_factory=list)
    last_call: str | None = None
    num_moves: int = 0
    rss: int = 0
    stack_file: str = ""

    @property
    def name(self) -> str:
        return self.role if self.role == CONTROLLER else f"{self.role} rank {self.rank}"

    def to_json(self) -> dict[str, Any]:
        phases = [[vars(phase) for phase in thread] for thread in self.phases]
        return vars(self) | {"phases": phases, "waits": [vars(wait) for wait in self.waits]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "ProcessState":
        phases = [[PhaseState(**phase) for phase in thread] for thread in content["phases"]]
        return cls(**content | {"phases": phases, "waits": [WaitState(**wait) for wait in content["waits"]]})


CONTROLLER = "controller"


@dataclass(frozen=True)
class Stack:
    """A thread. ident: Python's; 0 if it is not known. frames: innermost first."""

    thread: str
    ident: int
    frames: list[Frame]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Stack":
        return cls(
            str(content["thread"]),
            int(content["ident"]),
            [(str(f), int(line), str(name)) for f, line, name in content["frames"]],
        )


@dataclass(frozen=True)
class Link:
    """Where the processes of a run report to. key: both sides prove that they have it."""

    host: str
    port: int
    key: bytes


_link: Link | None = None
_gauges: dict[str, Callable[[], object]] = {}
_stack_fd: int | None = None


def set_link(link: Link | None) -> None:
    """The controller's, for the processes that it starts from now on."""
    global _link
    _link = link


def current_link() -> Link | None:
    return _link


def set_gauge(name: str, read: Callable[[], object] | None) -> None:
    """A number for reports, such as the length of a queue; None removes it."""
    _gauges.pop(name, None)
    if read is not None:
        _gauges[name] = read


def gauges() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, read in list(_gauges.items()):
        with suppress(Exception):  # it may change while it is read
            found[name] = read()
    return found


def process_state(role: str = CONTROLLER, rank: int = 0) -> ProcessState:
    """What this process does now."""
    waits = progress.waits()
    active = [wait for wait in waits if wait.kind not in progress.PASSIVE and wait.kind != "file"]
    return ProcessState(
        role,
        rank,
        os.getpid(),
        socket.gethostname(),
        machine(),
        time.monotonic(),
        list(phases_by_thread().values()),
        _longest(waits),
        len(waits),
        sum(hash((wait.kind, wait.name, wait.began)) for wait in active),  # a wait may be entered again
        [f"{track[0]}.{name}" for name, track in spans.open_calls()],
        None if (last := spans.last_call()) is None else f"{last[1][0]}.{last[0]}",
        progress.num_moves() + spans.num_ended(without=POLLS),
        _rss(),
        _stack_file(),
    )


def phases_by_thread() -> dict[int, list[PhaseState]]:
    """See `progress.by_thread`."""
    return {
        thread: [PhaseState(p.name, p.began, p.done, p.total, p.unit) for p in phases]
        for thread, phases in progress.by_thread().items()
    }


def _longest(waits: Sequence[progress.Wait]) -> list[WaitState]:
    """The first MAX_WAITS of each kind."""
    found: list[WaitState] = []
    counts: Counter[str] = Counter()
    for wait in waits:
        counts[wait.kind] += 1
        if counts[wait.kind] <= MAX_WAITS:
            found.append(WaitState(wait.kind, wait.name, wait.began, wait.thread))
    return found


@functools.cache
def machine() -> str:
    """Identifies the machine, or the container if that has its own process ids."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(parts)


def stacks() -> list[Stack]:
    """The stacks of all threads but this one; the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, this = threading.main_thread().ident, threading.get_ident()
    found = [(ident, frame) for ident, frame in sys._current_frames().items() if ident != this]
    found = [item for item in found if not names.get(item[0], "").startswith("watchdog")]
    found.sort(key=lambda item: item[0] != main)
    return [Stack(names.get(ident, str(ident)), ident, _frames(frame)) for ident, frame in found]


def parse_stacks(text: str) -> list[Stack]:
    """What faulthandler has written."""
    found: list[Stack] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            found.append(Stack(thread["id"], int(thread["id"], 16), []))
        elif (frame := _FRAME.match(line)) and found:
            found[-1].frames.append((frame["file"], int(frame["line"]), frame["name"]))
    return found


def is_debugged(frames: Sequence[Frame]) -> bool:
    """Whether a debugger holds the thread: it was called by the thread's code. Not the debugger's own threads, nor its launcher."""
    is_called = False  # walking inwards: there is code outside of this frame that is neither a debugger's nor Python's
    for file, _, _ in reversed(frames):
        if any(name in file for name in DEBUGGERS):
            if is_called:
                return True
        elif not file.startswith(_STDLIB) or f"{os.sep}site-packages{os.sep}" in file:
            is_called = True
    return False


def is_thread_debugged(ident: int) -> bool:
    """`is_debugged` for a thread of this process."""
    frame = sys._current_frames().get(ident)
    return frame is not None and is_debugged(_frames(frame))


def write_stacks_on_signal() -> None:
    """From now on STACK_SIGNAL lets this process write the stacks of all threads, whatever it does. No-op if the signal is in use
    or the system does not allow it."""
    global _stack_fd
    if _stack_fd is not None or not hasattr(os, "memfd_create"):
        return
    if signal.getsignal(STACK_SIGNAL) not in (signal.SIG_DFL, None):
        return
    with suppress(OSError, ValueError, RuntimeError):
        fd = os.memfd_create("lockstep-stacks")
        faulthandler.register(STACK_SIGNAL, fd, all_threads=True)
        _stack_fd = fd


def signalled_stacks(pid: int, stack_file: str) -> list[Stack]:
    """The stacks of a process of this machine and user, by STACK_SIGNAL; empty if it does not write any."""
    return parse_stacks(_signalled_text(pid, stack_file))


def _signalled_text(pid: int, stack_file: str) -> str:
    if not stack_file:
        return ""
    try:
        before = os.stat(stack_file).st_size
        os.kill(pid, STACK_SIGNAL)
        end = time.monotonic() + SIGNAL_TIMEOUT_S
        size = before
        while time.monotonic() < end:
            time.sleep(0.05)
            last, size = size, os.stat(stack_file).st_size
            if size > before and size == last:
                break
        with open(stack_file, "rb") as file:
            file.seek(before)
            return file.read(MAX_MESSAGE_BYTES).decode(errors="replace")
    except OSError:
        return ""


STOPPED = "The process is stopped (SIGSTOP, or a debugger)."


def awaited_stacks() -> dict[str, str]:
    """Of the processes that this one waits for and that do not report themselves, by the name of the wait."""
    found = {}
    for wait in progress.waits():
        if wait.stacks is not None:
            with suppress(Exception):  # the process may have ended
                found[wait.name] = wait.stacks()
    return found


def child_stacks(pid: int) -> str:
    """Of a forked child, which has inherited the handler of STACK_SIGNAL, as faulthandler writes them."""
    return STOPPED if is_stopped(pid) else _signalled_text(pid, _stack_file())


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped by a signal or a debugger."""
    return _system_state(pid) in ("T", "t")


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists and has not ended; True if the system does not say."""
    return _system_state(pid) not in ("Z", "X") and (os.path.exists(f"/proc/{pid}") or not os.path.exists("/proc/self"))


def _system_state(pid: int) -> str:
    """A letter, as `ps` shows it; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def start(link: Link | None, role: str, rank: int) -> None:
    """Report to the controller, until this process or the connection ends; no-op without a link."""
    if link is None:
        return
    write_stacks_on_signal()
    threading.Thread(target=_report, args=(link, role, rank), name="heartbeat", daemon=True).start()


def _report(link: Link, role: str, rank: int) -> None:
    num_failed = 0
    while num_failed < MAX_ATTEMPTS:
        num_failed += 1
        with suppress(*CONNECTION_ERRORS), _connect(link) as connection:
            num_failed = 0
            _serve(connection, role, rank)
        time.sleep(RECONNECT_S)


def _connect(link: Link) -> Connection:
    with socket.create_connection((link.host, link.port), CONNECT_TIMEOUT_S) as made:
        connection = as_connection(made)
        try:
            with timed(made):
                answer_challenge(connection, link.key)
                deliver_challenge(connection, link.key)
        except BaseException:
            connection.close()
            raise
    return connection


def as_connection(made: socket.socket) -> Connection:
    """Of a TCP socket, which the caller closes. A machine that is lost ends it."""
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(os.dup(made.fileno()))


@contextmanager
def timed(made: socket.socket) -> Iterator[None]:
    """What is read inside raises OSError if it does not come within CONNECT_TIMEOUT_S."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(CONNECT_TIMEOUT_S), 0))
    yield
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _serve(connection: Connection, role: str, rank: int) -> None:
    while True:
        _send(connection, {"state": process_state(role, rank).to_json()})
        if connection.poll(INTERVAL_S):
            _answer(connection, json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES)))


def _answer(connection: Connection, request: dict[str, Any]) -> None:
    """DUMP: own stacks; SIGNAL and KILL: for another process of this machine, which does not answer."""
    what = request["request"]
    if what == DUMP:
        own = {"stacks": [vars(s) for s in stacks()], "spans": spans.recent_spans(), "awaited": awaited_stacks()}
        _send(connection, own)
        return
    pid = int(request["pid"])
    if what == KILL:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        return
    found = [vars(s) for s in signalled_stacks(pid, str(request["stack_file"]))]
    _send(connection, {"stacks_of": pid, "is_stopped": is_stopped(pid), "stacks": found})


def _send(connection: Connection, content: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(content).encode())


def _frames(frame: Any) -> list[Frame]:
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _stack_file() -> str:
    return "" if _stack_fd is None else f"/proc/{os.getpid()}/fd/{_stack_fd}"


def _rss() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
