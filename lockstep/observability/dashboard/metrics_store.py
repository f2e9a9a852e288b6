"""The metrics of a run as columns, read on from where the last read ended."""

import json
import math
import threading
from pathlib import Path
from typing import Any

Rows = dict[int, dict[str, float]]


class MetricsStore:
    """values of `metrics.jsonl` by step; if a step has several lines the last value counts. A file that was replaced is read again.

    Safe to use from several threads. A file that does not exist has no steps.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._rows: Rows = {}
        self._times: dict[int, float] = {}
        self._position = 0
        self._inode = -1

    def refresh(self) -> None:
        with self._lock:
            try:
                self._read_on()
            except OSError:
                self._forget()

    def _read_on(self) -> None:
        with open(self.file, "rb") as lines:
            lines.seek(0, 2)
            size = lines.tell()
            inode = self.file.stat().st_ino
            if size < self._position or inode != self._inode:
                self._forget()
                self._inode = inode
            lines.seek(self._position)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            row: dict[str, Any] = json.loads(line)
            step = int(row.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        if isinstance(begun := row.pop("time", None), int | float):
            self._times[step] = float(begun)
        odd = row.pop("non_finite", None)
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        if isinstance(odd, dict):
            numbers |= {name: math.nan for name in odd if name in row}
        self._rows.setdefault(step, {}).update(numbers)

    @property
    def steps(self) -> list[int]:
        self.refresh()
        return sorted(self._rows)

    def names(self) -> list[str]:
        self.refresh()
        return sorted({name for row in self._rows.values() for name in row})

    def last(self) -> tuple[int, dict[str, float]]:
        """The last step and its metrics; 0 and none if there is no step."""
        steps = self.steps
        return (steps[-1], self._rows[steps[-1]]) if steps else (0, {})

    def column(self, name: str) -> tuple[list[int], list[float], list[float]]:
        """Steps that have the metric, its values, and the times at which they were logged."""
        steps = [step for step in self.steps if name in self._rows[step]]
        return steps, [self._rows[step][name] for step in steps], [self._times.get(step, math.nan) for step in steps]
