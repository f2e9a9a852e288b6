"""What this process is doing now: nested phases with counts, shown by the live display, or logged if a phase takes long.

    with phase("generate"):                 generate
        count(312, 1024, "sequences")       generate 312/1024 sequences
    with phase("rewards"):
        count(12, 256, call_began=...)      rewards 12/256, one call running for 30 s

    with waiting("tool", "search"): ...     what the process waits for outside of it: for the watchdog

Reporting is a few assignments, so that inner loops can afford it; another thread may read between two of them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 30.0
"""A phase that takes longer is logged, and again after each such interval."""
LONG_CALL_S = 5.0
"""A single call that runs for longer is mentioned."""


@dataclass(eq=False)
class Phase:
    """call_began: when the call that has been running for longest began."""

    name: str
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int | None = None
    unit: str = ""
    call_began: float | None = None

    def __str__(self) -> str:
        text = self.name if self.total is None else f"{self.name} {self.done}/{self.total} {self.unit}".rstrip()
        running_s = 0.0 if self.call_began is None else time.monotonic() - self.call_began
        return f"{text}, one call running for {running_s:.0f} s" if running_s >= LONG_CALL_S else text


_threads: dict[int, list[Phase]] = {}
"""The phases of each thread that has any, outermost first; a thread's id to its phases."""

_completed: dict[str, float] = {}
"""Names of phases that have ended in this process, and when one last did."""

_num_moves = 0

_num_displays = 0
"""Live displays that show the phases; while there is one, nothing is logged."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The block is a phase of the process, within the thread's current one if there is one."""
    entered = Phase(name)
    thread = threading.get_ident()
    phases = _threads.setdefault(thread, [])
    phases.append(entered)
    try:
        yield
    finally:
        if entered in phases:
            del phases[phases.index(entered) :]
        if not phases:
            _threads.pop(thread, None)
        _completed[name] = time.monotonic()


def moved() -> None:
    """A sign of progress that no count shows, such as a finished request, for the watchdog."""
    global _num_moves
    _num_moves += 1


def num_moves() -> int:
    return _num_moves


def completed(since: float) -> list[str]:
    """Names of the phases that have ended since this time of `time.monotonic`."""
    return sorted(name for name, ended in _completed.copy().items() if ended >= since)


def count(done: int, total: int, unit: str = "", call_began: float | None = None) -> None:
    """How far the thread's current phase is; no-op outside of one."""
    if phases := _threads.get(threading.get_ident()):
        current = phases[-1]
        current.done, current.total, current.unit, current.call_began = done, total, unit, call_began


WaitKind = Literal[
    "reward",
    "tool",
    "judge",
    "interaction",
    "environment",
    "program",
    "server",
    "worker",
    "data loader",
    "file",
    "queue",
]


@dataclass(eq=False)
class Wait:
    """Something outside of this thread that it waits for.

    name:   which one, such as a function, a tool, a URL, a path.
    began:  when that began, in seconds of `time.monotonic`.
    stacks: reads those of the process that it waits for, if that does not report to the watchdog itself.
    """

    kind: WaitKind
    name: str
    began: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    stacks: Callable[[], str] | None = None


PASSIVE = frozenset({"worker", "queue"})
"""Kinds of waits for another process or thread of the run, which is the one to blame."""

_waits: set[Wait] = set()


@contextmanager
def waiting(
    kind: WaitKind, name: str, began: float | None = None, stacks: Callable[[], str] | None = None
) -> Iterator[Wait]:
    """The block waits for something outside of this thread or coroutine; see `Wait`. began: now by default."""
    wait = Wait(kind, name, time.monotonic() if began is None else began, stacks=stacks)
    _waits.add(wait)
    try:
        yield wait
    finally:
        _waits.discard(wait)


def waits() -> list[Wait]:
    """What this process waits for, longest first."""
    return sorted(_waits.copy(), key=lambda wait: wait.began)


def by_thread() -> dict[int, list[Phase]]:
    """The phases of each thread that has any, outermost first; a thread's id to its phases."""
    return {thread: phases for thread, own in list(_threads.items()) if (phases := list(own))}


def current() -> list[list[Phase]]:
    """`by_thread`, without the threads."""
    return list(by_thread().values())


def describe() -> tuple[str, float]:
    """All phases in one line, and the seconds since the first began; empty and 0 if there is none."""
    phases = [phase for own in current() for phase in own]
    return ", ".join(map(str, phases)), time.monotonic() - phases[0].began if phases else 0.0


def show_live(is_shown: bool) -> None:
    """A display that shows `describe` begins, or ends."""
    global _num_displays
    _num_displays += 1 if is_shown else -1


class ProgressLog:
    """While it is entered, logs every phase that takes longer than `interval_s`, again after each such interval."""

    def __init__(self, interval_s: float | None = None) -> None:
        self._interval_s = REPORT_INTERVAL_S if interval_s is None else interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "ProgressLog":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        logged = None
        logged_at = 0.0
        while not self._ended.wait(min(1.0, self._interval_s / 4)):
            outermost = next((own[0] for own in current()), None)
            if outermost is None or _num_displays:
                continue
            now = time.monotonic()
            if now - (logged_at if outermost is logged else outermost.began) >= self._interval_s:
                logged, logged_at = outermost, now
                text, seconds = describe()
                logger.info("%s, %.0f s so far", text, seconds)
