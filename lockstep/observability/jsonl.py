"""JSON-lines files: `metrics.jsonl` of every run, and the `file` tracker.

A line is `{"step": 12, "time": 1735689600.0, "actor/pg_loss": 0.1, ...}`. JSON has no NaN or infinity, so such values
are null and the line also has `"non_finite": {"actor/pg_loss": "nan"}`.
"""

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.observability.tracker import Metrics, RunInfo, plain
from lockstep.utils.files import atomic_writer, ensure_writable
from lockstep.utils.progress import waiting

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
"""The metrics of a run, in its folder."""

PATH_VARIABLE = "LOCKSTEP_FILE_LOGGER_PATH"


def json_line(data: Metrics) -> bytes:
    """`data` as one line of strict JSON. Lone surrogates, which models emit, are written as JSON escapes."""
    non_finite: dict[str, str] = {}
    row = {str(key): _finite(plain(value), str(key), non_finite) for key, value in data.items()}
    if non_finite:
        row["non_finite"] = non_finite
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any, path: str, non_finite: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[path] = str(value)
        return None
    if isinstance(value, dict):
        return {key: _finite(item, f"{path}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item, f"{path}.{index}", non_finite) for index, item in enumerate(value)]
    return value


def truncate_after(path: Path | str, step: int) -> None:
    """Drop the lines of steps after `step`, and lines that are not JSON, such as one cut off by a kill.

    No-op if the file does not exist. The file is replaced atomically, so a crash loses nothing.
    """
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb") as old, atomic_writer(path) as new:
        for number, line in enumerate(old, start=1):
            line_step = _step_of(line)
            if line_step is None:
                logger.warning("%s: dropping incomplete line %d", path, number)
            elif line_step <= step:
                new.write(line)


def _step_of(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def steps_in(path: Path) -> list[int]:
    """The steps of the complete lines, in order."""
    if not path.exists():
        return []
    with open(path, "rb") as lines:
        return [step for line in lines if (step := _step_of(line)) is not None]


def read_metrics(path: Path, begin: int = 0) -> list[dict[str, Any]]:
    """The complete lines from byte `begin` on, with the non-finite numbers restored; empty if there is no file."""
    if not path.exists():
        return []
    with open(path, "rb") as lines:
        lines.seek(begin)
        return [_restored(json.loads(line)) for line in lines if _step_of(line) is not None]


def _restored(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: float(text) for name, text in row.pop("non_finite", {}).items() if name in row}


def last_step(path: Path) -> int | None:
    """The largest step that has a complete line, or None. It need not be the last line: an older checkpoint may be evaluated."""
    return max(steps_in(path), default=None)


def missing_steps(path: Path, before: int) -> list[int]:
    """Steps that have no line, from the file's first step to `before`, which is not included."""
    found = set(steps_in(path))
    return [step for step in range(min(found, default=before), before) if step not in found]


def cut_unfinished_line(path: Path) -> None:
    """Truncate the file after the last line break."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        position = file.seek(0, os.SEEK_END)
        tail = b""
        while position > 0 and b"\n" not in tail:
            position = max(0, position - 65536)
            file.seek(position)
            tail = file.read(65536)
        file.truncate(position + tail.rfind(b"\n") + 1)


def prepare(path: Path, start_step: int | None) -> None:
    """Prepare an existing file for appending.

    start_step N > 0 drops later lines; 0 starts a new file and renames the old one to `<name>.old`; None appends.
    """
    if start_step == 0 and path.exists() and path.stat().st_size > 0:
        path.replace(path.with_name(path.name + ".old"))
    elif start_step:
        truncate_after(path, start_step)
    else:
        cut_unfinished_line(path)


class JsonlFile:
    """A file that is appended to line by line, unbuffered.

    key: the setting that selects the folder, for error messages.
    """

    def __init__(self, path: Path, key: str, start_step: int | None = None) -> None:
        ensure_writable(path.parent, key)
        prepare(path, start_step)
        self.path = path
        self.key = key
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def append(self, data: Metrics, step: int) -> None:
        head = {"step": step, "time": round(time.time(), 3)}
        self.write(json_line(head | dict(data) | head))

    def write(self, line: bytes) -> None:
        """Append a line that is JSON with a `step`."""
        rest = memoryview(line)
        try:
            with waiting("file", str(self.path)):
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path} (set by {self.key}): {error.strerror}") from error

    def sync(self) -> None:
        """Flush the lines to disk."""
        with waiting("file", str(self.path)):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class FileTracker:
    """Tracker `file`: metrics to $LOCKSTEP_FILE_LOGGER_PATH or `tracker.jsonl` in the run's folder.

    Tables go to `<name>.tables.jsonl` next to it.
    """

    def __init__(self, run: RunInfo) -> None:
        chosen = os.environ.get(PATH_VARIABLE)
        path = Path(chosen).expanduser() if chosen else run.run_dir / "tracker.jsonl"
        self._start_step = run.start_step
        self._metrics = JsonlFile(path, PATH_VARIABLE if chosen else "trainer.default_local_dir", run.start_step)
        self._tables: JsonlFile | None = None

    def log(self, data: Metrics, step: int) -> None:
        self._metrics.append(data, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        if self._tables is None:
            path = self._metrics.path.with_suffix(".tables.jsonl")
            self._tables = JsonlFile(path, self._metrics.key, self._start_step)
        self._tables.append({"name": name, "columns": columns, "rows": rows}, step)

    def finish(self) -> None:
        self._metrics.close()
        if self._tables is not None:
            self._tables.close()
