"""The groups of all steps by prompt, for "the same prompt over training time": a SQLite file in the user's cache folder.

dumps ─► tables, newest step first, by a background thread ─► one row per group with its statistics ─► history of a prompt

The file can be deleted at any time. Several dashboards may use it at once. If it cannot be written, the index is kept in memory.
"""

import hashlib
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.observability.rollout_table import GroupStats, Stamp, StepTable, read_table, stamp_of

logger = logging.getLogger(__name__)

VERSION = 1
KEPT_DAYS = 30
BUSY_TIMEOUT_S = 10.0
NICENESS = 10
START_DELAY_S = 0.5
"""What the page asks for first is answered first."""
BATCH_S = 0.2
"""Steps that are read within this time are written together."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (
    kind TEXT, step INTEGER, file TEXT, size INTEGER, mtime_ns INTEGER, first_row INTEGER, num_rows INTEGER,
    PRIMARY KEY (kind, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, kind TEXT, prompt INTEGER, step INTEGER, number INTEGER,
    n INTEGER, mean REAL, low REAL, high REAL, std REAL, length REAL, cut REAL, pass_rate REAL
);
CREATE INDEX IF NOT EXISTS groups_of_prompt ON groups (prompt, kind);
"""
"""steps: which files have been read; the rows of a step are `groups` first_row to first_row + num_rows - 1."""

Listing = Callable[[], Mapping[str, Mapping[int, Path]]]
"""Returns kind -> step -> dump, as it is now; the same mappings if nothing has changed."""


class Dump(NamedTuple):
    """A dump to read."""

    kind: str
    step: int
    path: Path
    stamp: Stamp


class PromptIndex:
    """folder: of the run. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.file = cache_folder() / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]}.sqlite"
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._worker: threading.Thread | None = None
        self._filled: Mapping[str, Mapping[int, Path]] = {}

    def fill(self, listing: Listing) -> threading.Thread:
        """Read what is new, in the background; one thread at a time. Returns the last thread."""
        files = listing()
        with self._lock:
            is_done = all(files[kind] is self._filled.get(kind) for kind in files)
            if self._worker is None or not (self._worker.is_alive() or is_done):
                self._worker = threading.Thread(target=self._fill, args=[listing], name="prompt-index", daemon=True)
                self._worker.start()
            return self._worker

    def num_steps(self, kind: str) -> int:
        """How many steps are indexed."""
        return int(self._query("SELECT COUNT(*) FROM steps WHERE kind = ?", kind)[0][0])

    def history(self, kind: str, key: str) -> list[tuple[int, int, GroupStats]]:
        """(step, number of its group, statistics) of a prompt, first step first. Groups of one step are taken together."""
        try:
            prompt = _as_integer(key)
        except ValueError:
            raise ValueError(f"key={key[:40]!r}: must be 16 hexadecimal digits") from None
        columns = "step, number, n, mean, low, high, std, length, cut, pass_rate"
        rows = self._query(
            f"SELECT {columns} FROM groups WHERE prompt = ? AND kind = ? ORDER BY step, number", prompt, kind
        )
        by_step: dict[int, list[tuple[int, GroupStats]]] = {}
        for step, number, n, *numbers in rows:
            stats = GroupStats(n, *(math.nan if value is None else value for value in numbers))
            by_step.setdefault(step, []).append((number, stats))
        return [
            (step, groups[0][0], _joined([stats for _, stats in groups])) for step, groups in sorted(by_step.items())
        ]

    def _fill(self, listing: Listing) -> None:
        with suppress(OSError, AttributeError):  # lower priority for this thread; Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        tried: set[Dump] = set()  # ones that cannot be read are not tried again
        try:
            time.sleep(START_DELAY_S)
            while True:
                files = listing()
                todo = [dump for dump in self._to_do(files) if dump not in tried]
                if not todo:
                    self._filled = files
                    return
                tried |= set(todo)
                self._read(todo)
        except (OSError, ValueError, sqlite3.Error) as error:
            logger.warning("prompt index: %s", error)

    def _to_do(self, files: Mapping[str, Mapping[int, Path]]) -> list[Dump]:
        """Dumps that are new or have changed, newest first; forgets those that are gone."""
        known = {(kind, step): stamp for kind, step, *stamp in self._query("SELECT * FROM steps")}
        if gone := [place for place in known if place[1] not in files.get(place[0], {})]:
            with self._connection() as database, _transaction(database):
                for kind, step in gone:
                    _forget(database, kind, step)
        todo = []
        for kind, dumps in files.items():
            for step, path in dumps.items():
                with suppress(OSError):
                    stamp = stamp_of(os.stat(path))
                    if known.get((kind, step), [])[:3] != [str(path), *stamp]:
                        todo.append(Dump(kind, step, path, stamp))
        return sorted(todo, key=lambda dump: -dump.step)

    def _read(self, todo: Sequence[Dump]) -> None:
        batch: list[tuple[str, int, StepTable]] = []
        begun = time.monotonic()
        for dump in todo:
            try:
                batch.append((dump.kind, dump.step, read_table(dump.path)))
            except OSError:  # it was deleted
                continue
            if time.monotonic() - begun > BATCH_S:
                self._write(batch)
                time.sleep(time.monotonic() - begun)  # half of the time for others
                batch, begun = [], time.monotonic()
        self._write(batch)

    def _write(self, batch: Sequence[tuple[str, int, StepTable]]) -> None:
        with self._connection() as database, _transaction(database):
            for kind, step, table in batch:
                _forget(database, kind, step)
                first = database.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM groups").fetchone()[0]
                rows = [
                    (first + place, kind, _as_integer(group.key), step, group.number, *astuple(group.stats))
                    for place, group in enumerate(table.groups)
                ]
                database.executemany(f"INSERT INTO groups VALUES ({', '.join('?' * 13)})", rows)
                place = (kind, step, str(table.path), *table.stamp, first, len(rows))
                database.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?)", place)

    def _query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._connection() as database:
            return database.execute(statement, values).fetchall()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """One thread at a time. A database that proves damaged or cannot be used any more is replaced for the next caller."""
        with self._lock:
            if self._database is None:
                self._database = open_database(self.file)
            try:
                yield self._database
            except sqlite3.DatabaseError as error:
                self._database.close()
                self._database = None
                if _is_damage(error):
                    self.file.expanduser().unlink(missing_ok=True)
                elif "locked" not in str(error):  # the disk is full, or the file cannot be written any more
                    self._database = _opened(None)
                raise


def cache_folder() -> Path:
    """May begin with ~, which cannot be resolved if there is no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lockstep" / "dashboard"


def open_database(file: Path) -> sqlite3.Connection:
    """The database in the file; one that is damaged or of another version is replaced. In memory if the file cannot be written."""
    try:
        file = file.expanduser()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_unused(file.parent)
        try:
            return _opened(file)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        for leftover in (file, file.with_name(f"{file.name}-journal")):
            leftover.unlink(missing_ok=True)
        return _opened(file)
    except (OSError, sqlite3.Error, RuntimeError) as error:  # RuntimeError: there is no home folder
        logger.warning("the index of prompts is kept in memory, since %s cannot be written: %s", file, error)
        return _opened(None)


def _opened(file: Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(
        file or ":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        found = database.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise sqlite3.DatabaseError(f"version {found}")
        database.execute("PRAGMA synchronous = OFF")  # a cache: what a power failure damages is made again
        if found == 0:
            if file is not None:
                file.chmod(0o600)
            with _transaction(database):
                for statement in SCHEMA.split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        database.close()
        raise
    return database


def remove_unused(folder: Path) -> None:
    """Indexes that no dashboard has written to for long."""
    oldest = time.time() - KEPT_DAYS * 86400
    for file in folder.glob("*.sqlite"):
        with suppress(OSError):
            if file.stat().st_mtime < oldest:
                file.unlink()


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def _forget(database: sqlite3.Connection, kind: str, step: int) -> None:
    place = "WHERE kind = ? AND step = ?"
    for first, count in database.execute(f"SELECT first_row, num_rows FROM steps {place}", (kind, step)).fetchall():
        database.execute("DELETE FROM groups WHERE id BETWEEN ? AND ?", (first, first + count - 1))
        database.execute(f"DELETE FROM steps {place}", (kind, step))


def _joined(groups: Sequence[GroupStats]) -> GroupStats:
    """Several groups as one."""
    if len(groups) == 1:
        return groups[0]
    n = sum(group.n for group in groups)
    scored = [group for group in groups if not math.isnan(group.mean)]

    def mean(values: Sequence[tuple[float, int]]) -> float:
        known = [(value, weight) for value, weight in values if not math.isnan(value)]
        return (
            sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else math.nan
        )

    centre = mean([(group.mean, group.n) for group in scored])
    return GroupStats(
        n=n,
        mean=centre,
        low=min((group.low for group in scored), default=math.nan),
        high=max((group.high for group in scored), default=math.nan),
        std=math.sqrt(
            mean([(group.std * group.std + (group.mean - centre) * (group.mean - centre), group.n) for group in scored])
        ),
        length=mean([(group.length, group.n) for group in groups]),
        cut=mean([(group.cut, group.n) for group in groups]),
        pass_rate=mean([(group.pass_rate, group.n) for group in groups]),
    )


def _as_integer(key: str) -> int:
    """The prompt's key as SQLite's signed 64 bits."""
    return int.from_bytes(bytes.fromhex(key), signed=True) if len(key) == 16 else int("")


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return not isinstance(error, sqlite3.OperationalError) or "malformed" in str(error)
