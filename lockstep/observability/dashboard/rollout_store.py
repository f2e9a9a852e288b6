"""The dumps of one run: which steps have one, and their tables, kept while the files do not change."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.dashboard.prompt_index import PromptIndex
from lockstep.observability.numbers import number
from lockstep.observability.rollout_files import DumpFolder, NoDumps, dump_folders, dumps_in, merged, no_dumps
from lockstep.observability.rollout_table import StepTable, read_table, stamp_of
from lockstep.observability.run_folder import starts
from lockstep.observability.status_file import read_status

Kind = Literal["train", "validation"]
KINDS: tuple[Kind, ...] = get_args(Kind)

KEPT_ROWS = 400_000
KEPT_TABLES = 64
"""How much of the tables of all runs is kept in memory: about 0.5 kB per row."""
SETTLED_NS = 2 * 10**9
"""A folder that changed less than this ago may change again with the same mtime."""


@dataclass
class _Listing:
    """Step -> dump of one kind, sorted. found: also those of abandoned steps; stamps: what it was made from."""

    stamps: object = None
    folders: list[DumpFolder] = field(default_factory=list)
    missing: str | None = None
    folder_stamps: object = None
    found: dict[int, Path] = field(default_factory=dict)
    files: dict[int, Path] = field(default_factory=dict)


class TableCache:
    """The tables that were used last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[Path, StepTable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def get(self, path: Path) -> StepTable | None:
        with self._lock:
            return self._tables.get(path)

    def put(self, path: Path, table: StepTable) -> None:
        """As the one that was used last."""
        with self._lock:
            self._tables[path] = table
            self._tables.move_to_end(path)
            rows = sum(len(each.rows) for each in self._tables.values())
            while len(self._tables) > 1 and (len(self._tables) > KEPT_TABLES or rows > KEPT_ROWS):
                _, oldest = self._tables.popitem(last=False)
                rows -= len(oldest.rows)


TABLES = TableCache()
"""Of all runs."""


class RolloutStore:
    """metrics: of the run. Safe to use from several threads."""

    def __init__(self, folder: Path, metrics: MetricsStore) -> None:
        self.folder, self.metrics = folder, metrics
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._listings: dict[Kind, _Listing] = {kind: _Listing() for kind in KINDS}
        self.index = PromptIndex(folder)

    def files(self, kind: Kind) -> Mapping[int, Path]:
        """Step -> dump, first step first; empty if there are none. Raises ValueError if the run's config cannot be read."""
        with self._lock:
            return self._listing(kind).files

    def why_none(self, kind: Kind) -> str | None:
        """In words, what to set; None if there are dumps."""
        try:
            with self._lock:
                listing = self._listing(kind)
        except (ValueError, OSError) as error:
            return str(error)
        if listing.files:
            return None
        if listing.found:
            return (
                f"The run has not reached step {min(listing.found)} again, the first with a dump, since it was resumed."
            )
        reason = no_dumps(self.folder, kind == "validation", listing.missing)
        if isinstance(reason, NoDumps):
            return (
                f"This run wrote no {'validations' if kind == 'validation' else 'training samples'}: {reason.remedy}."
            )
        return str(reason)

    def table(self, kind: Kind, step: int | None = None) -> tuple[int, StepTable]:
        """The table of a step, or of the newest one."""
        files = self.files(kind)
        if not files:
            raise ValueError(self.why_none(kind) or "the dumps were deleted")
        chosen = max(files) if step is None else step
        if chosen not in files:
            raise ValueError(f"step {chosen} has no dump: there are {len(files):,}, from {min(files)} to {max(files)}")
        return chosen, self._table(files[chosen])

    def _table(self, path: Path) -> StepTable:
        with self._reading:
            known = TABLES.get(path)
            if known is None or known.stamp != stamp_of(os.stat(path)):
                known = read_table(path)
            TABLES.put(path, known)
            return known

    def _listing(self, kind: Kind) -> _Listing:
        listing = self._listings[kind]
        stamps = [(config, _mtime(config)) for _, config in starts(self.folder)]
        folder_stamps = [(folder, _mtime(folder.path)) for folder in listing.folders]
        is_gone = any(stamp is None for _, stamp in folder_stamps)
        if listing.stamps != stamps or listing.missing or is_gone:  # a folder that is missing may be made later
            listing = _Listing(stamps, *dump_folders(self.folder, kind == "validation"))
            folder_stamps = [(folder, _mtime(folder.path)) for folder in listing.folders]
        if listing.folder_stamps != folder_stamps:
            files = merged((folder, dumps_in(folder.path)) for folder in listing.folders)
            listing.found = dict(sorted(files.items()))
            newest = max((stamp or 0 for _, stamp in folder_stamps), default=0)
            listing.folder_stamps = folder_stamps if time.time_ns() - newest > SETTLED_NS else None
        files = self._without_abandoned(listing.found)
        if files is listing.found or files != listing.files:
            listing.files = files
        self._listings[kind] = listing
        return listing

    def _without_abandoned(self, files: dict[int, Path]) -> dict[int, Path]:
        """A run that resumes from a checkpoint cuts its metrics there; later dumps are overwritten when it reaches their steps.

        The dump of a step may be written before its metrics. A run without metrics keeps all.
        """
        last, metrics = self.metrics.last()
        if not files or not metrics:
            return files
        last = max(last, int(number((read_status(self.folder) or {}).get("step")) or 0)) + 1
        return files if max(files) <= last else {step: path for step, path in files.items() if step <= last}


def _mtime(path: Path) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
