"""Injects a fault into this process at its k-th file-system event in the run's folder."""

import errno
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Action = Literal["count", "kill", "term", "int", "term all", "disk full", "read-only", "too large"]

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}
"""Audit events of Python; os.fsync has none and is wrapped. Files that compiled code opens are not seen."""

ERRORS = {"disk full": errno.ENOSPC, "read-only": errno.EROFS, "too large": errno.EFBIG}
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Injection:
    """What to do at which event.

    at:   number of the event, from 1. Signals are sent once; errors are raised by every write from this event on.
    root: only events on paths under it count.
    log:  file that gets a line per event.
    """

    action: Action
    at: int
    root: str
    log: str


def install(injection: Injection) -> None:
    """Start to count; not inherited by forked processes."""
    owner, root = os.getpid(), os.path.abspath(injection.root)
    log = os.open(injection.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    count, is_busy = 0, False

    def on_event(event: str, path: Any, is_write: bool) -> None:
        nonlocal count, is_busy
        if is_busy or os.getpid() != owner:
            return
        is_busy = True
        try:
            count += 1
            os.write(log, f"{event} {path}\n".encode())
            if injection.action in ERRORS:
                if count >= injection.at and is_write:
                    code = ERRORS[injection.action]
                    raise OSError(code, os.strerror(code), str(path))
            elif count == injection.at and injection.action != "count":
                _signal(injection.action)
        finally:
            is_busy = False

    def is_inside(path: Any, folder: Any = -1) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        text = os.fsdecode(path)
        if not os.path.isabs(text) and isinstance(folder, int) and folder >= 0:
            return True  # shutil.rmtree works relative to open folders
        return os.path.abspath(text).startswith(root)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or not args or not is_inside(args[0], args[-1]):
            return
        changes_files = event in ("os.rename", "os.mkdir") or (event == "open" and bool(args[2] & WRITING))
        on_event(event, args[0], changes_files)

    fsync = os.fsync

    def counted_fsync(descriptor: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_inside(path):
            on_event("fsync", path, True)
        fsync(descriptor)

    os.fsync = counted_fsync
    sys.addaudithook(hook)


def _signal(action: str) -> None:
    if action == "term all":
        for pid in [*descendants(os.getpid()), os.getpid()]:
            os.kill(pid, signal.SIGTERM)
    else:
        os.kill(os.getpid(), SIGNALS[action])


def descendants(pid: int) -> list[int]:
    """Process ids of the children, their children and so on."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found, level = [], [pid]
    while level := [child for child, parent in parents.items() if parent in level]:
        found += level
    return found
