"""The list of runs."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.observability.dashboard.health_view import run_state
from lockstep.observability.dashboard.request import Api, ApiRequest, Recorded
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.jsonl import METRICS_FILE
from lockstep.observability.run_folder import STATUS

logger = logging.getLogger(__name__)


def list_runs(request: ApiRequest) -> list[dict[str, Any]]:
    """Newest first: by when they last wrote."""
    runs = request.runs.all()
    written = {run.name: max(run.written_ns(METRICS_FILE), run.written_ns(STATUS)) for run in runs}
    rows = []
    for run in sorted(runs, key=lambda run: (-written[run.name], run.name)):
        row: dict[str, Any] = {"name": run.name, "folder": str(run.folder), "state": "unknown", "step": 0}
        try:
            step, metrics = run.metrics.last()
            row |= {"state": run_state(run), "step": step, "reward": metrics.get("critic/score/mean")}
        except Exception as error:  # one that cannot be read does not hide the others
            logger.warning("the run %s cannot be read: %s", run.folder, error, exc_info=True)
        rows.append({"reward": None} | row)
    return rows


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    yield Recorded("/api/runs", {})


ROUTES: dict[str, Api] = {"/api/runs": list_runs}
