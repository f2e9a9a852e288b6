"""The folders of runs below the paths that the command names."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.dashboard.rollout_store import RolloutStore
from lockstep.observability.jsonl import METRICS_FILE
from lockstep.observability.run_folder import CONFIG

SCAN_INTERVAL_S = 2.0
DEPTH = 4
"""How many folders below a path a run may be."""
MOST_RUNS = 1000


@dataclass(frozen=True)
class RunFolder:
    """name: its path below the one that the command names; it identifies the run in URLs."""

    name: str
    folder: Path
    metrics: MetricsStore = field(compare=False)

    @cached_property
    def rollouts(self) -> RolloutStore:
        return RolloutStore(self.folder)

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
        self._scanned = float("-inf")

    def all(self) -> list[RunFolder]:
        """By name. The folders are scanned again after `SCAN_INTERVAL_S`."""
        with self._lock:
            if time.monotonic() - self._scanned > SCAN_INTERVAL_S:
                self._found = {name: self._run(name, folder) for name, folder in self._scan()}
                self._scanned = time.monotonic()
            return [self._found[name] for name in sorted(self._found)]

    def get(self, name: str) -> RunFolder | None:
        return next((run for run in self.all() if run.name == name), None)

    def _run(self, name: str, folder: Path) -> RunFolder:
        known = self._found.get(name)
        if known is not None and known.folder == folder:
            return known
        return RunFolder(name, folder, MetricsStore(folder / METRICS_FILE))

    def _scan(self) -> Iterator[tuple[str, Path]]:
        several = len(self.paths) > 1
        count = 0
        for path in self.paths:
            for folder in run_folders(path, DEPTH):
                inside = folder.relative_to(path).as_posix()
                name = path.name if inside == "." else f"{path.name}/{inside}" if several else inside
                yield name, folder
                count += 1
                if count == MOST_RUNS:
                    return


def run_folders(path: Path, depth: int) -> Iterator[Path]:
    """The folder itself if it is a run's, else those of the runs below it."""
    if (path / CONFIG).is_file() or (path / METRICS_FILE).is_file():
        yield path
        return
    if depth == 0:
        return
    try:
        inner = sorted(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    except OSError:  # no access, or it was deleted
        return
    for folder in inner:
        if not Path(folder).name.startswith("."):
            yield from run_folders(Path(folder), depth - 1)
