"""The metrics of a run as columns, read on from where the last read ended.

metrics.jsonl ─► complete lines ─► blocks (lines with the same metrics, as numbers) ─► the column of a metric, by step
"""

import json
import math
import os
import threading
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lockstep.observability.numbers import number
from lockstep.utils.untrusted import JSON_ERRORS

CHUNK_BYTES = 1 << 20
MOST_LINE_BYTES = 16 << 20
"""A longer line is no line of metrics and is skipped."""
TAIL_BYTES = 1 << 14
"""What is read at first from the end of a file for its last step."""
MARK_BYTES = 64
"""Bytes before the position that tell whether the file is still the one that was read."""


class Column(NamedTuple):
    """The steps that have a metric, in order, its values (NaN and infinities too), and the times at which they were logged."""

    steps: np.ndarray
    values: np.ndarray
    times: np.ndarray


class Line(NamedTuple):
    """time: NaN if the line has none."""

    step: int
    time: float
    names: tuple[str, ...]
    values: "array[float]"


class _Block:
    """Lines with the same metrics. numbers: of the lines in the file; values: line after line."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.place = {name: index for index, name in enumerate(names)}
        self.numbers = array("q")
        self.steps = array("q")
        self.times = array("d")
        self.values = array("d")

    def add(self, number: int, line: Line) -> None:
        self.numbers.append(number)
        self.steps.append(line.step)
        self.times.append(line.time)
        self.values.extend(line.values)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Line numbers, steps, values and times: copies, since an array that is viewed cannot grow."""
        values = np.frombuffer(self.values)[self.place[name] :: len(self.place)].copy()
        return np.array(self.numbers), np.array(self.steps), values, np.array(self.times)


class MetricsStore:
    """If a step has several lines the last value of a metric counts. A file that was replaced or cut is read again.

    Lines that are not JSON with a step, and values that are not numbers, are skipped. A file that does not exist has no steps.

    Safe to use from several threads.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._last: tuple[int, dict[str, float]] = (0, {})
        self._last_seen: tuple[int, ...] = ()
        self._forget()

    def _forget(self) -> None:
        self._blocks: dict[tuple[str, ...], _Block] = {}
        self._num_lines = 0
        self._position = 0
        self._mark = b""
        self._skipping = False
        self._seen: tuple[int, ...] = ()

    def names(self) -> list[str]:
        with self._lock:
            self._refresh()
            return sorted({name for names in self._blocks for name in names})

    def column(self, name: str) -> tuple[list[int], list[float], list[float]]:
        """Steps that have the metric, its values, and the times at which they were logged."""
        steps, values, times = self.arrays(name)
        return steps.tolist(), values.tolist(), times.tolist()

    def arrays(self, name: str) -> Column:
        with self._lock:
            self._refresh()
            parts = [block.column(name) for block in self._blocks.values() if name in block.place]
        if not parts:
            return Column(np.empty(0, np.int64), np.empty(0), np.empty(0))
        numbers, steps, values, times = map(np.concatenate, zip(*parts))
        order = np.lexsort((numbers, steps))
        chosen = order[np.append(np.diff(steps[order]) != 0, True)]
        return Column(steps[chosen], values[chosen], times[chosen])

    def first_time(self) -> float:
        """When the first line was logged; NaN if no line has a time."""
        with self._lock:
            self._refresh()
            return min(
                (time for block in self._blocks.values() for time in block.times if time == time), default=math.nan
            )

    def last(self) -> tuple[int, dict[str, float]]:
        """The last step and its metrics; 0 and none if there is no step. Reads only the end of a file that was not read yet."""
        with self._lock:
            if (now := self._signature()) == self._last_seen:
                return self._last
            try:
                self._last = _merged(self._lines_of_last_step() if self._position else _lines_at_end(self.file))
            except OSError:
                self._last = (0, {})
            self._last_seen = now
            return self._last

    def _steps(self) -> np.ndarray:
        return np.unique(np.concatenate([np.empty(0, np.int64), *(np.array(b.steps) for b in self._blocks.values())]))

    def _lines_of_last_step(self) -> list[Line]:
        self._refresh()
        last = self._steps()[-1:]
        found: list[tuple[int, Line]] = []
        for names, block in self._blocks.items():
            for row in np.flatnonzero(np.array(block.steps) == last):
                values = block.values[row * len(names) : (row + 1) * len(names)]
                found.append((block.numbers[row], Line(block.steps[row], block.times[row], names, values)))
        return [line for _, line in sorted(found, key=lambda item: item[0])]

    def _signature(self) -> tuple[int, ...]:
        """Changes if the file does."""
        try:
            found = os.stat(self.file)
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _refresh(self) -> None:
        now = self._signature()
        if now and now == self._seen:
            return
        try:
            with open(self.file, "rb") as file:
                self._read_on(file)
                self._seen = now
        except OSError:
            self._forget()

    def _read_on(self, file: BinaryIO) -> None:
        file.seek(self._position - len(self._mark))
        if file.read(len(self._mark)) != self._mark:
            self._forget()
            file.seek(0)
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
            if len(rest) > MOST_LINE_BYTES:
                self._advance(rest)
                self._skipping, rest = True, b""

    def _take(self, text: bytes) -> None:
        self._advance(text + b"\n")
        skipped, self._skipping = self._skipping, False
        if skipped or (line := parse_line(text)) is None:
            return
        block = self._blocks.get(line.names)
        if block is None:
            block = self._blocks[line.names] = _Block(line.names)
        block.add(self._num_lines, line)
        self._num_lines += 1

    def _advance(self, read: bytes) -> None:
        self._position += len(read)
        self._mark = (self._mark + read[-MARK_BYTES:])[-MARK_BYTES:]


def parse_line(text: bytes) -> Line | None:
    """None if it is not JSON with a step."""
    try:
        row: dict[str, Any] = json.loads(text)
        step = row.pop("step")
        time = row.pop("time", math.nan)
    except (*JSON_ERRORS, KeyError, TypeError, AttributeError):
        return None
    if type(step) is not int or abs(step) >= 2**53:
        return None
    try:
        values = array("d", row.values())
    except (TypeError, OverflowError):
        row = dict(_numbers(row))
        values = array("d", row.values())
    logged_at = number(time)
    return Line(step, math.nan if logged_at is None else logged_at, tuple(row), values)


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The values that are numbers; those that JSON lacks are null and named in `non_finite`."""
    odd = row.pop("non_finite", None)
    odd = odd if isinstance(odd, dict) else {}
    for name, value in row.items():
        if value is None and name in odd:
            yield name, {"inf": math.inf, "-inf": -math.inf}.get(str(odd[name]), math.nan)
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1023):
            yield name, float(value)


def _lines_at_end(path: Path) -> list[Line]:
    """The lines of the largest step among the last ones."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = TAIL_BYTES
        while True:
            file.seek(max(0, size - length))
            lines = file.read(length).split(b"\n")[0 if length >= size else 1 : -1]
            found = [line for text in lines if (line := parse_line(text)) is not None]
            if found or length >= min(size, MOST_LINE_BYTES):
                last = max((line.step for line in found), default=0)
                return [line for line in found if line.step == last]
            length *= 4


def _merged(lines: Iterable[Line]) -> tuple[int, dict[str, float]]:
    step = 0
    metrics: dict[str, float] = {}
    for line in lines:
        step = line.step
        metrics |= dict(zip(line.names, line.values))
    return step, metrics
