"""The folders of runs below the paths that the command names."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.dashboard.rollout_store import RolloutStore
from lockstep.observability.jsonl import METRICS_FILE
from lockstep.observability.run_folder import CONFIG

SCAN_INTERVAL_S = 2.0
SCANNED_SHARE = 0.02
"""Of the time: a folder that takes long to scan is scanned less often."""
DEPTH = 4
"""How many folders below a path a run may be."""
MOST_RUNS = 1000
"""Of more runs those whose folders changed last."""
MOST_FOLDERS = 100_000
"""That one scan looks into, below each path; nearer ones first."""


@dataclass(frozen=True)
class RunFolder:
    """name: its path below the one that the command names; it identifies the run in URLs."""

    name: str
    folder: Path
    metrics: MetricsStore = field(compare=False)
    rollouts: RolloutStore = field(compare=False)

    def written_ns(self, file: str) -> int:
        """When a file of the folder was last written; 0 if there is none."""
        try:
            return (self.folder / file).stat().st_mtime_ns
        except OSError:
            return 0


class Runs:
    """Finds runs, also ones that begin later. paths: runs, or folders of runs. Safe to use from several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [path.expanduser().resolve() for path in paths]
        self._lock = threading.Lock()
        self._found: dict[str, RunFolder] = {}
        self._next_scan = float("-inf")

    def all(self) -> list[RunFolder]:
        """By name. The folders are scanned again after `SCAN_INTERVAL_S`."""
        with self._lock:
            begin = time.monotonic()
            if begin >= self._next_scan:
                self._found = {name: self._run(name, folder) for name, folder in self._scan().items()}
                end = time.monotonic()
                self._next_scan = end + max(SCAN_INTERVAL_S, (end - begin) / SCANNED_SHARE)
            return [self._found[name] for name in sorted(self._found)]

    def get(self, name: str) -> RunFolder | None:
        return next((run for run in self.all() if run.name == name), None)

    def _run(self, name: str, folder: Path) -> RunFolder:
        known = self._found.get(name)
        if known is not None and known.folder == folder:
            return known
        metrics = MetricsStore(folder / METRICS_FILE)
        return RunFolder(name, folder, metrics, RolloutStore(folder, metrics))

    def _scan(self) -> dict[str, Path]:
        """Name to folder."""
        found: dict[str, Path] = {}
        for path in self.paths:
            for folder in run_folders(path, DEPTH):
                inside = folder.relative_to(path).as_posix()
                several = len(self.paths) > 1
                name = path.name if inside == "." else f"{path.name}/{inside}" if several else inside
                found[str(folder) if name in found else name] = folder
        if len(found) > MOST_RUNS:
            found = dict(sorted(found.items(), key=lambda item: _changed_at(item[1]))[-MOST_RUNS:])
        return found


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # it was deleted
        return 0.0


def run_folders(path: Path, depth: int) -> Iterator[Path]:
    """The folder itself if it is a run's, else those of the runs below it."""
    waiting = deque([(path, depth)])
    for _ in range(MOST_FOLDERS):
        if not waiting:
            return
        folder, depth = waiting.popleft()
        if any(os.path.isfile(folder / name) for name in (CONFIG, METRICS_FILE)):  # False without access
            yield folder
        elif depth > 0:
            room = MOST_FOLDERS - len(waiting)
            waiting.extend((inner, depth - 1) for inner in _folders_in(folder)[:room])


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in islice(entries, MOST_FOLDERS) if not entry.name.startswith(".")]
        return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
    except OSError:  # no access, or it was deleted
        return []
