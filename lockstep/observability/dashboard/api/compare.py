"""The compare panel: settings and results of two runs, and two runs or steps on the same prompts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.observability.compare import results
from lockstep.observability.curves import Points
from lockstep.observability.dashboard.prompt_pairs import Side, pairs_of, summary_of
from lockstep.observability.dashboard.request import Api, ApiRequest, Recorded, json_list
from lockstep.observability.dashboard.rollout_store import KINDS, Kind
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.rollout_table import StepTable, text_in

PAGE = 20
RESPONSES = 4
TEXT_CHARS = 1500
READ_BYTES = 64 << 20
"""Of the rows that are read for one answer; further ones come without their texts."""


@dataclass(frozen=True)
class StoredRun:
    """A run as `results` reads it. Values that are not numbers are left out."""

    run: RunFolder

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def last_step(self) -> int:
        return self.run.metrics.last()[0]

    @property
    def metrics(self) -> set[str]:
        return set(self.run.metrics.names())

    def points(self, metric: str) -> Points:
        steps, values, _ = self.run.metrics.column(metric)
        return [(step, value) for step, value in zip(steps, values) if math.isfinite(value)]


def compared_results(request: ApiRequest) -> dict[str, Any]:
    """What `lockstep compare` says about the results of runs."""
    runs = [StoredRun(run) for run in request.several_runs()]
    rows = [{"name": name, "values": values} for name, values in results(runs)]
    return {"runs": [run.name for run in runs], "rows": rows}


def compared_prompts(request: ApiRequest) -> dict[str, Any]:
    """A page of the prompts that two dumps have, largest change of the mean score first."""
    kind: Kind = "train" if request.text("kind") == "train" else "validation"
    sides = []
    for side in ("left", "right"):
        run = request.run(side)
        step = request.number(f"{side}_step") if request.params.get(f"{side}_step") else None
        sides.append(run.rollouts.table(kind, step))
    (left_step, left), (right_step, right) = sides
    pairs, matched_by = pairs_of(left, right)
    summary = summary_of(pairs)
    shown = [pair for pair in pairs if pair.change] if request.params.get("changed") else pairs
    begin = request.number("page", 0) * PAGE
    budget = Budget(READ_BYTES)
    items = [
        {
            "prompt": pair.prompt,
            "change": pair.change,
            "left": side_item(left, pair.left, budget),
            "right": side_item(right, pair.right, budget),
        }
        for pair in shown[begin : begin + PAGE]
    ]
    return {
        "left_step": left_step,
        "right_step": right_step,
        "left_prompts": len(left.groups),
        "right_prompts": len(right.groups),
        "matched_by": matched_by,
        "summary": asdict(summary),
        "total": len(shown),
        "per_page": PAGE,
        "items": items,
    }


@dataclass
class Budget:
    """Bytes that may still be read."""

    left: int

    def allows(self, size: int) -> bool:
        self.left -= size
        return self.left >= 0


def side_item(table: StepTable, side: Side, budget: Budget) -> dict[str, Any]:
    responses = [
        {
            "row": row.line,
            "score": row.score,
            "acc": row.acc,
            "length": row.length,
            "text": shortened(text_in(table.read(row), "output")) if budget.allows(row.size) else None,
        }
        for row in side.rows[:RESPONSES]
    ]
    return {"group": side.group, "n": len(side.rows), "mean": side.mean, "acc": side.acc, "responses": responses}


def shortened(text: str) -> str:
    """The beginning and the end, where answers are."""
    if len(text) <= TEXT_CHARS:
        return text
    head, tail = text[: TEXT_CHARS * 2 // 3], text[-(TEXT_CHARS // 3) :]
    return f"{head} [... {len(text) - len(head) - len(tail):,} characters ...] {tail}"


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    """Each pair of runs, and of each run its first step against its last."""
    names = [run.name for run in runs]
    pairs = [(left, right) for left in names for right in names if left != right]
    for left, right in pairs:
        yield Recorded("/api/compare/results", {"runs": json_list([left, right])})
    for changed in ({}, {"changed": "1"}):
        for kind in KINDS[::-1]:
            for left, right in pairs:
                yield Recorded("/api/compare/prompts", {"kind": kind, "left": left, "right": right} | changed)
            for run in runs:
                if not run.rollouts.why_none(kind):
                    first = {"left_step": str(min(run.rollouts.files(kind)))}
                    params = {"kind": kind, "left": run.name} | first | {"right": run.name} | changed
                    yield Recorded("/api/compare/prompts", params)


ROUTES: dict[str, Api] = {"/api/compare/results": compared_results, "/api/compare/prompts": compared_prompts}
