"""One step of `timeline.jsonl`, found by binary search: steps rise in the file, and a large run writes gigabytes of it."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.observability.timeline import TIMELINE_FILE, by_begin, spans_in
from lockstep.utils.spans import Span
from lockstep.utils.untrusted import JSON_ERRORS

LONGEST_LINE = 64 * 2**20
SCANNED_BYTES = 256 * 2**20
"""The most that one search passes over in search of a readable line."""
NEAR_BYTES = 2**16
"""Distance from which lines are read one by one."""

MOST_NUMBER = 2**53
"""Larger integers are no times or ranks, and neither floats nor the page can hold them."""

_HEAD = re.compile(rb'\{"step": ?(\d{1,15}),')


@dataclass(frozen=True)
class TimelineStep:
    """previous, following: steps beside it that have spans; None at the ends. last: the newest step of the run."""

    step: int
    spans: list[Span]
    previous: int | None
    following: int | None
    last: int


def read_step(run: Path, step: int | None = None) -> TimelineStep:
    """The spans of a step, by begin; by default of the newest. ValueError if there are none."""
    with open(run / TIMELINE_FILE, "rb") as file:
        last = _last_step(file)
        if last is None:
            raise ValueError(f"{TIMELINE_FILE} has no complete step yet")
        wanted = last if step is None else step
        previous = following = None
        spans: list[Span] = []
        for found, line in _lines(file, _before(file, wanted)):
            if found > wanted:
                following = found
                break
            if found < wanted:
                previous = found
            else:
                spans += _spans(line)
    if not spans:
        beside = " and ".join(str(each) for each in (previous, following) if each is not None)
        raise ValueError(f"{TIMELINE_FILE} has no spans of step {wanted}; the nearest steps are {beside or 'none'}")
    return TimelineStep(wanted, by_begin(spans), previous, following, last)


def _before(file: BinaryIO, step: int) -> int:
    """The begin of a line of an earlier step, near the first line of `step`; 0 if there is none."""
    low, high = 0, _size(file)
    while high - low > NEAR_BYTES:
        middle = (low + high) // 2
        begin, found = _first_line(file, middle)
        if found is None or begin >= high or found >= step:
            high = middle
        else:
            low = begin
    return low


def _first_line(file: BinaryIO, position: int) -> tuple[int, int | None]:
    """Begin and step of the first readable line that begins at `position` or later; the step is None if there is none."""
    file.seek(position - 1)
    file.readline(LONGEST_LINE)
    begin = file.tell()
    while (line := file.readline(LONGEST_LINE)) and begin - position < SCANNED_BYTES:
        if (step := _step(line)) is not None:
            return begin, step
        begin = file.tell()
    return begin, None


def _lines(file: BinaryIO, begin: int) -> Iterator[tuple[int, bytes]]:
    file.seek(begin)
    while (line := file.readline(LONGEST_LINE)) and file.tell() - begin < SCANNED_BYTES:
        if (step := _step(line)) is not None:
            yield step, line


def _last_step(file: BinaryIO) -> int | None:
    """Of the last complete line."""
    size = _size(file)
    length = NEAR_BYTES
    while True:
        begin = max(0, size - length)
        file.seek(begin)
        lines = file.read(min(length, size)).splitlines(keepends=True)
        for line in reversed(lines if begin == 0 else lines[1:]):
            if (step := _step(line)) is not None:
                return step
        if begin == 0 or length >= LONGEST_LINE:
            return None
        length *= 4


def _step(line: bytes) -> int | None:
    """None for a line that is being written or is not one of a timeline."""
    match = _HEAD.match(line) if line.endswith(b"\n") else None
    return int(match[1]) if match else None


def _spans(line: bytes) -> list[Span]:
    try:
        spans = spans_in(json.loads(line))
    except (*JSON_ERRORS, TypeError, KeyError, AttributeError, OverflowError):
        return []
    return [span for span in spans if _is_sound(span)]


def _is_sound(span: Span) -> bool:
    numbers = (span.rank, span.begin_us, span.end_us)
    return (
        isinstance(span.name, str)
        and isinstance(span.role, str)
        and all(isinstance(each, int) and abs(each) < MOST_NUMBER for each in numbers)
    )


def _size(file: BinaryIO) -> int:
    return file.seek(0, os.SEEK_END)
