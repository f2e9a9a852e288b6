"""Processes that tools started and left running: they end with the run.

    a call ends  ─► the children of its thread, and theirs, are noted
    the run ends ─► those that still run are terminated, and killed if they do not end

Linux only: /proc lists the children of each thread. A process whose parent ended within the call is no longer among them; it is
found if this process leads its process group, as commands in a terminal do.
"""

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GRACE_S = 1.0
"""Time to end after a signal."""
MANY = 256
"""Noted processes, after which those that have ended are forgotten."""
_noted: dict[int, int] = {}
"""Id of a process to its start time: ids are used again."""
_first_call: list[float] = []
"""When the first thread was looked at, in clock ticks since the machine started."""
os.register_at_fork(after_in_child=_noted.clear)
os.register_at_fork(after_in_child=_first_call.clear)


class _Process(NamedTuple):
    """A process that has not ended. start_time: in clock ticks since the machine started."""

    parent: int
    group: int
    start_time: int


def begin_call() -> None:
    """A call of a tool begins."""
    if not _first_call and hasattr(time, "CLOCK_BOOTTIME"):
        _first_call.append(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def note_children(thread_id: int) -> None:
    """Note the processes that a thread of this process started, and their descendants."""
    for pid in _children(f"self/task/{thread_id}"):
        _note((pid, *_descendants(pid)))
    if len(_noted) > MANY:
        for pid in _noted.keys() - set(_running()):
            _noted.pop(pid, None)


def end_noted() -> None:
    """End the noted processes that still run, their descendants, and orphans of a process group that this process leads."""
    for pid in (*_running(), *_orphans()):
        _note((pid, *_descendants(pid)))
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        for pid in _running():
            with suppress(OSError):
                os.kill(pid, number)
        while _running() and time.monotonic() < deadline:
            time.sleep(0.01)
    _noted.clear()


def _note(pids: Collection[int]) -> None:
    for pid in pids:
        if (process := _process(pid)) is not None:
            _noted[pid] = process.start_time


def _running() -> list[int]:
    """The noted processes that have not ended."""
    found = [(pid, start_time, _process(pid)) for pid, start_time in list(_noted.items())]
    return [pid for pid, start_time, now in found if now is not None and now.start_time == start_time]


def _orphans() -> Iterator[int]:
    """Processes of the group that this process leads, started since the first call, whose parents have ended."""
    own = os.getpid()
    if not _first_call or os.getpgrp() != own:
        return
    for folder in Path("/proc").iterdir():
        process = _process(int(folder.name)) if folder.name.isdecimal() else None
        if process is not None and process.group == own and process.start_time > _first_call[0]:
            parent = _process(process.parent)
            if parent is None or parent.group != own:
                yield int(folder.name)


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in _children(f"{pid}/task/{thread.name}"):
                yield child
                yield from _descendants(child)


def _children(place: str) -> list[int]:
    """The children of a thread, by its place in /proc."""
    try:
        return [int(word) for word in Path(f"/proc/{place}/children").read_text().split()]
    except OSError:
        return []


def _process(pid: int) -> _Process | None:
    """None if it has ended, also if its parent has not taken note of it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else _Process(int(fields[1]), int(fields[2]), int(fields[19]))
