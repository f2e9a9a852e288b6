"""Which rows a loader has drawn in the current epoch, for the audit `data_order`: none twice and none left out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Rule = Literal["each_once", "distinct", "any"]
"""What the order promises. each_once: every row once in an epoch. distinct: no row twice in a batch, of a sampler with
`replacement = False`. any: of other samplers, which may repeat rows."""


class RowLedger:
    """num_rows: of the dataset. problem: the first thing that is wrong since `take_problem`."""

    def __init__(self, num_rows: int, rule: Rule) -> None:
        self.rule = rule
        self._is_drawn = np.zeros(num_rows if rule == "each_once" else 0, dtype=bool)
        self._digest = 0
        self._problem: str | None = None

    def draw(self, rows: Sequence[int], epoch: int) -> None:
        """A batch of these rows is handed out."""
        if self.rule == "any":
            return
        (row, times), *_ = Counter(rows).most_common(1)
        if times > 1:
            self._note(f"row {row} of the dataset is {times} times in one batch of epoch {epoch}")
        if self.rule == "each_once":
            again = [row for row in rows if self._is_drawn[row]]
            if again:
                self._note(
                    f"row {again[0]} of the dataset is drawn again in epoch {epoch} ({len(again)} rows of the batch are)"
                )
            self._add(rows)

    def end_epoch(self, epoch: int, most_left: int) -> None:
        """The epoch's last batch is drawn. most_left: rows that may be left, because they are less than a batch."""
        if self.rule != "each_once":
            return
        left = np.flatnonzero(~self._is_drawn)
        if len(left) > most_left:
            self._note(
                f"epoch {epoch} ended without {len(left)} of {len(self._is_drawn)} rows, such as row {left[0]}; at most "
                f"{most_left} may be left over by the batch size"
            )
        self._forget()

    def take_problem(self) -> str | None:
        taken, self._problem = self._problem, None
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Number and digest of the rows that were drawn."""
        return {"count": int(self._is_drawn.sum()), "digest": self._digest}

    def resume(self, earlier: Sequence[int], epoch: int, state: dict[str, Any] | None) -> None:
        """earlier: the rows that the order has before the position of a checkpoint; state: of the checkpoint, if it has one."""
        if self.rule != "each_once":
            return
        self._forget()
        self._add(earlier)
        if state is not None and state != self.state_dict():
            self._note(
                f"the {state['count']} rows drawn in epoch {epoch} before the checkpoint are not the {len(earlier)} that the order "
                "has before its position: the resumed run would repeat or leave out rows"
            )

    def _add(self, rows: Sequence[int]) -> None:
        numbers = np.asarray(rows, dtype=np.uint64)
        self._is_drawn[numbers.astype(np.int64)] = True
        self._digest = (self._digest + int(_mixed(numbers).sum(dtype=np.uint64))) % 2**64

    def _forget(self) -> None:
        self._is_drawn[:] = False
        self._digest = 0

    def _note(self, problem: str) -> None:
        self._problem = self._problem or problem


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """A random-looking 64-bit number of each, so that their sum tells sets apart (the finalizer of SplitMix64)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
