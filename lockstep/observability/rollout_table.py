"""One dump as a small table: where each row is in the file, and the numbers by which it is sorted and filtered.

{step}.jsonl ─► lines with offsets ─► TableRow ─► TableGroup (one per prompt) ─► StepTable; a row is read whole by its offset

Made for files of any content: damaged lines are counted and left out; what is missing or of a wrong type is unknown (NaN or None).
"""

import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lockstep.observability.rollout_files import MAIN_COLUMNS, Row, number_in
from lockstep.utils.untrusted import JSON_ERRORS

MAX_LINE_BYTES = 64 * 2**20
"""Longer lines count as damaged."""
PROMPT_CHARS = 300
PASSED_ABOVE = 0.5
"""A response passes if `acc` of the reward function, or without it the score, is higher."""
COUNT_COLUMNS = (
    *("num_turns", "tool_call_counts", "tool_error_counts", "malformed_call_counts"),
    *("trajectory_breaks", "program_error_counts", "environment_error_counts"),
)
"""Columns of a dump: counts of a conversation."""
ROLLOUT_COLUMNS = (*COUNT_COLUMNS, "reward_scores", "turn_rewards")
"""Columns of a dump: counts of a conversation, and rewards by its tools, environment and turns."""
Stamp = tuple[int, int]
"""Size and mtime of a file in ns: a file with the same stamp has not changed."""


class TableRow(NamedTuple):
    """A response. line: in the file from 0; group: number of its group; offset, size: its bytes in the file; acc: by the reward."""

    line: int
    group: int
    offset: int
    size: int
    score: float
    advantage: float
    length: float
    finish_reason: str | None
    turns: float
    tool_errors: float
    reward_failed: bool
    acc: float

    @property
    def passed(self) -> bool:
        return (self.score if math.isnan(self.acc) else self.acc) > PASSED_ABOVE


@dataclass(frozen=True)
class GroupStats:
    """Of the scores that are numbers; NaN without any. std: of the population; cut: share cut at the maximum length."""

    n: int
    mean: float
    low: float
    high: float
    std: float
    length: float
    cut: float
    pass_rate: float


@dataclass(frozen=True)
class TableGroup:
    """The responses to one prompt.

    number: from 1, in the order of the file.
    key:    names the prompt in all steps.
    prompt: its beginning.
    """

    number: int
    uid: str | None
    key: str
    prompt: str
    rows: list[TableRow]

    @cached_property
    def stats(self) -> GroupStats:
        return stats_of(self.rows)

    @property
    def has_equal_scores(self) -> bool:
        """Several responses with one score: no advantage, nothing to learn from. A score that is no number differs from all."""
        return len(self.rows) > 1 and all(row.score == self.rows[0].score for row in self.rows)


@dataclass(frozen=True)
class StepTable:
    """damaged: lines that are no rows."""

    path: Path
    stamp: Stamp
    groups: list[TableGroup]
    damaged: int

    @cached_property
    def rows(self) -> dict[int, TableRow]:
        """By line."""
        found = {row.line: row for group in self.groups for row in group.rows}
        return dict(sorted(found.items()))

    @cached_property
    def summary(self) -> "StepSummary":
        return _summary(self)

    def read(self, row: TableRow) -> Row:
        """The whole row. Raises ValueError if the file has changed since the table was made."""
        with open(self.path, "rb") as file:
            file.seek(row.offset)
            whole = parse_row(file.read(row.size)) if stamp_of(os.fstat(file.fileno())) == self.stamp else None
        if whole is None:
            raise ValueError(f"{self.path} has changed while it was read: try again")
        return whole


@dataclass(frozen=True)
class StepSummary:
    """stops: finish reason -> responses, most first; num_equal: groups of several responses with equal scores, of num_several."""

    num_groups: int
    stats: GroupStats | None
    stops: dict[str, int]
    num_several: int
    num_equal: int
    has_advantage: bool
    has_turns: bool
    has_acc: bool
    num_tool_errors: int
    num_reward_failed: int


def _summary(table: StepTable) -> StepSummary:
    rows = list(table.rows.values())
    several = [group for group in table.groups if len(group.rows) > 1]
    return StepSummary(
        num_groups=len(table.groups),
        stats=stats_of(rows) if rows else None,
        stops=dict(Counter(row.finish_reason or "unknown" for row in rows).most_common(20)),
        num_several=len(several),
        num_equal=sum(group.has_equal_scores for group in several),
        has_advantage=any(not math.isnan(row.advantage) for row in rows),
        has_turns=any(not math.isnan(row.turns) for row in rows),
        has_acc=any(not math.isnan(row.acc) for row in rows),
        num_tool_errors=sum(row.tool_errors > 0 for row in rows),
        num_reward_failed=sum(row.reward_failed for row in rows),
    )


def read_table(path: Path) -> StepTable:
    groups: dict[str | bytes, TableGroup] = {}
    damaged = 0
    with open(path, "rb") as file:
        stamp = stamp_of(os.fstat(file.fileno()))
        for number, offset, _, line in lines_of(file):
            row = parse_row(line)
            if row is None:
                damaged += bool(line.strip()) or not line
                continue
            uid = uid_of(row)
            name = uid if uid is not None else prompt_digest(row)
            group = groups.get(name)
            if group is None:
                key = prompt_digest(row).hex()
                group = groups[name] = TableGroup(len(groups) + 1, uid, key, text_in(row, "input")[:PROMPT_CHARS], [])
            group.rows.append(_table_row(row, number, group.number, offset, len(line)))
    return StepTable(path, stamp, list(groups.values()), damaged)


def lines_of(file: BinaryIO, number: int = 0) -> Iterator[tuple[int, int, int, bytes]]:
    """(number, begin, end, line) from the file's position on, which is at line `number`; a line that is too long is empty."""
    offset = file.tell()
    while line := file.readline(MAX_LINE_BYTES):
        size = len(line)
        if size == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = b""
            while part := file.readline(MAX_LINE_BYTES):
                size += len(part)
                if part.endswith(b"\n"):
                    break
        yield number, offset, offset + size, line
        offset += size
        number += 1


def parse_row(line: bytes) -> Row | None:
    """None if it is no row. Bytes that are no UTF-8 are replaced."""
    try:
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            row = json.loads(line.decode("utf-8", "replace"))
    except JSON_ERRORS:
        return None
    return row if isinstance(row, dict) else None


def _table_row(row: Row, line: int, group: int, offset: int, size: int) -> TableRow:
    return TableRow(
        line=line,
        group=group,
        offset=offset,
        size=size,
        score=number_in(row, "score"),
        advantage=number_in(row, "advantage"),
        length=number_in(row, "length"),
        finish_reason=sys.intern(text_in(row, "finish_reason")[:40]) or None,
        turns=number_in(row, "num_turns"),
        tool_errors=number_in(row, "tool_error_counts"),
        reward_failed=number_in(row, "reward_failed") > 0,
        acc=number_in(row, "acc"),
    )


def stats_of(rows: list[TableRow]) -> GroupStats:
    n = len(rows)
    scores = [row.score for row in rows if math.isfinite(row.score)]
    mean = sum(scores) / len(scores) if scores else math.nan
    lengths = [row.length for row in rows if math.isfinite(row.length)]
    return GroupStats(
        n=n,
        mean=mean,
        low=min(scores, default=math.nan),
        high=max(scores, default=math.nan),
        std=math.hypot(*(score - mean for score in scores)) / math.sqrt(len(scores)) if scores else math.nan,
        length=sum(lengths) / len(lengths) if lengths else math.nan,
        cut=sum(row.finish_reason == "length" for row in rows) / n,
        pass_rate=sum(row.passed for row in rows) / n,
    )


def uid_of(row: Row) -> str | None:
    return text_in(row, "uid")[:200] or None


def text_in(row: Row, column: str) -> str:
    """The column as text: JSON if it is something else, empty if it is missing."""
    return as_text(row.get(column))


def reward_columns(row: Row) -> list[str]:
    """Names of what the reward function returned besides the score."""
    return [name for name in row if name not in MAIN_COLUMNS and name not in ROLLOUT_COLUMNS]


def rollout_columns(row: Row) -> list[str]:
    """Names of the counts and rewards of the conversation, without empty ones."""
    return [name for name in ROLLOUT_COLUMNS if row.get(name) not in (None, {}, [])]


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "(nested too deeply)"


def prompt_digest(row: Row) -> bytes:
    """Names a prompt in all steps: its text and, if the dump has it, the row of the data set that it is."""
    text = f"{text_in(row, 'index')}\0{text_in(row, 'input')}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns
