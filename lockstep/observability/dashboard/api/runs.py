"""The list of runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.observability.dashboard.request import Api, ApiRequest, Recorded
from lockstep.observability.dashboard.runs import RunFolder


def list_runs(request: ApiRequest) -> list[dict[str, Any]]:
    """Newest first."""
    rows = []
    for run in request.runs.all():
        step, metrics = run.metrics.last()
        reward = metrics.get("critic/score/mean")
        rows.append({"name": run.name, "folder": str(run.folder), "step": step, "reward": reward})
    return rows


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    yield Recorded("/api/runs", {})


ROUTES: dict[str, Api] = {"/api/runs": list_runs}
