"""Two dumps on the same prompts: pairs of groups, and what changed between them.

StepTable x 2 ─► pairs (the same row of the data with the same text; else the same text) ─► changes, largest first
"""

import math
from dataclasses import dataclass

from lockstep.observability.rollout_table import StepTable, TableRow, text_in

READ_BYTES = 256 << 20
"""Of rows that are read to match prompts by their text."""


@dataclass(frozen=True)
class Side:
    """The responses to a prompt in one dump. group: the number of the first group."""

    group: int
    rows: list[TableRow]

    @property
    def mean(self) -> float:
        """Of the scores that are numbers; NaN without any."""
        return _mean([row.score for row in self.rows if math.isfinite(row.score)])

    @property
    def acc(self) -> float:
        """Mean `acc` of the reward function; NaN without any."""
        return _mean([row.acc for row in self.rows if math.isfinite(row.acc)])


@dataclass(frozen=True)
class Pair:
    """prompt: its beginning."""

    prompt: str
    left: Side
    right: Side

    @property
    def change(self) -> float:
        return self.right.mean - self.left.mean


@dataclass(frozen=True)
class Summary:
    """Of pairs with scores on both sides.

    error:               standard error of the mean change; NaN for fewer than two pairs.
    left_acc, right_acc: means of `acc` over the pairs that have it on both sides; NaN without any.
    """

    num_pairs: int
    left: float
    right: float
    change: float
    error: float
    num_better: int
    num_worse: int
    left_acc: float
    right_acc: float


def pairs_of(left: StepTable, right: StepTable) -> tuple[list[Pair], str]:
    """The prompts that both dumps have, largest change first, and by what they were matched."""
    for matched_by, key_of in (("row of the data and text", _keys), ("text", _texts)):
        lefts, rights = _sides(left, key_of(left)), _sides(right, key_of(right))
        prompts = {key: left.groups[side.group - 1].prompt for key, side in lefts.items() if key in rights}
        if prompts:
            pairs = [Pair(prompt, lefts[key], rights[key]) for key, prompt in prompts.items()]
            return sorted(pairs, key=lambda pair: -abs(pair.change) if pair.change == pair.change else 0.0), matched_by
    return [], "text"


def summary_of(pairs: list[Pair]) -> Summary:
    pairs = [pair for pair in pairs if pair.change == pair.change]
    num = len(pairs)
    change = _mean([pair.change for pair in pairs])
    with_acc = [pair for pair in pairs if not math.isnan(pair.left.acc + pair.right.acc)]
    spread = sum((pair.change - change) ** 2 for pair in pairs)
    return Summary(
        num_pairs=num,
        left=_mean([pair.left.mean for pair in pairs]),
        right=_mean([pair.right.mean for pair in pairs]),
        change=change,
        error=math.sqrt(spread / (num - 1) / num) if num > 1 else math.nan,
        num_better=sum(pair.change > 0 for pair in pairs),
        num_worse=sum(pair.change < 0 for pair in pairs),
        left_acc=_mean([pair.left.acc for pair in with_acc]),
        right_acc=_mean([pair.right.acc for pair in with_acc]),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _sides(table: StepTable, keys: list[str]) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    for key, group in zip(keys, table.groups):
        sides.setdefault(key, Side(group.number, [])).rows.extend(group.rows)
    return sides


def _keys(table: StepTable) -> list[str]:
    return [group.key for group in table.groups]


def _texts(table: StepTable) -> list[str]:
    """The whole prompts: their rows may be of data sets in another order."""
    if sum(group.rows[0].size for group in table.groups) > READ_BYTES:
        return _keys(table)
    return [text_in(table.read(group.rows[0]), "input") for group in table.groups]
