"""A run of the dashboard as the rules of `observability/health` see it."""

import os
import socket
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.health.process import State, state_of
from lockstep.observability.health.run_view import RunView, Series
from lockstep.observability.run_folder import AUDITS, CONFIG, PLAN
from lockstep.observability.status_file import read_json, read_status
from lockstep.utils.untrusted_yaml import read_yaml

MOST_CONFIG_BYTES = 5_000_000


def view_of(run: RunFolder) -> RunView:
    """All that rules read."""
    status = read_status(run.folder)

    def read(name: str) -> Series:
        steps, values, _ = run.metrics.column(name)
        return Series(steps, values)

    return RunView(
        read,
        run.metrics.names(),
        settings_of(run.folder),
        status,
        read_json(run.folder / PLAN),
        time.time(),
        is_alive(status),
        sorted(str(dump) for dump in (run.folder / AUDITS).glob("step_*")),
    )


def run_state(run: RunFolder) -> State:
    """Without a look at the metrics."""
    status = read_status(run.folder)
    return state_of(RunView(lambda name: Series((), ()), status=status, now=time.time(), is_alive=is_alive(status)))


def is_alive(status: Mapping[str, Any] | None) -> bool | None:
    """Whether the process of a status exists; None if it is not known to be of this machine."""
    pid = (status or {}).get("pid")
    if status is None or status.get("host") != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    return True


def settings_of(folder: Path) -> dict[str, Any]:
    """The run's config; empty if it has none that can be read."""
    path = folder / CONFIG
    try:
        found = path.stat()
    except OSError:
        return {}
    return {} if found.st_size > MOST_CONFIG_BYTES else _settings(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _settings(path: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
