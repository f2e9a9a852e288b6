"""Filtering and sorting the rows and groups of a step."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Literal

from lockstep.observability.rollout_table import StepTable, TableGroup, TableRow

Variance = Literal["", "zero", "nonzero"]
Problem = Literal["", "tool_error", "reward_failed"]


@dataclass(frozen=True)
class Filters:
    """Which rows match. A range leaves out rows whose value is unknown. lines: those that have the searched text; None is all."""

    stop: str = ""
    scores: tuple[float, float] = (-math.inf, math.inf)
    lengths: tuple[float, float] = (-math.inf, math.inf)
    variance: Variance = ""
    problem: Problem = ""
    lines: Set[int] | None = None

    def accepts_group(self, group: TableGroup) -> bool:
        """What holds for all rows of a group; a group of one has no variance to speak of."""
        if self.variance == "zero":
            return group.has_equal_scores
        return self.variance == "" or (len(group.rows) > 1 and not group.has_equal_scores)

    def accepts_row(self, row: TableRow) -> bool:
        return (
            (self.stop == "" or (row.finish_reason or "unknown") == self.stop)
            and _within(row.score, self.scores)
            and _within(row.length, self.lengths)
            and (self.problem != "tool_error" or row.tool_errors > 0)
            and (self.problem != "reward_failed" or row.reward_failed)
            and (self.lines is None or row.line in self.lines)
        )


def matching(table: StepTable, filters: Filters) -> list[tuple[TableGroup, list[TableRow]]]:
    """The groups with rows that match, and these rows."""
    found = (
        (group, [row for row in group.rows if filters.accepts_row(row)])
        for group in table.groups
        if filters.accepts_group(group)
    )
    return [(group, rows) for group, rows in found if rows]


ROW_ORDERS: dict[str, Callable[[TableRow], float]] = {
    "file": lambda row: row.line,
    "reward": lambda row: row.score,
    "length": lambda row: row.length,
    "advantage": lambda row: row.advantage,
    "turns": lambda row: row.turns,
    "tool_errors": lambda row: row.tool_errors,
}
GROUP_ORDERS: dict[str, Callable[[TableGroup], float]] = {
    "file": lambda group: group.number,
    "reward": lambda group: group.stats.mean,
    "length": lambda group: group.stats.length,
    "variance": lambda group: group.stats.std,
    "advantage": lambda group: _largest([row.advantage for row in group.rows]),
    "turns": lambda group: _largest([row.turns for row in group.rows]),
    "tool_errors": lambda group: _largest([row.tool_errors for row in group.rows]),
}
"""How groups are ordered: reward and length by the mean, advantage, turns and tool errors by the largest."""


def sort_key(value: float, descending: bool) -> tuple[bool, float]:
    """Unknown values come last."""
    if math.isnan(value):
        return True, 0.0
    return False, -value if descending else value


def _largest(values: list[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _within(value: float, limits: tuple[float, float]) -> bool:
    """NaN is within no range but the widest."""
    low, high = limits
    return low <= value <= high or (low == -math.inf and high == math.inf)
