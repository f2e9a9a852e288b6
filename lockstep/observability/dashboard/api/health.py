"""The health panel: what a run is doing now, its main curves, and what is wrong with it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.observability.dashboard.health_view import run_state, view_of
from lockstep.observability.dashboard.request import Api, ApiRequest, Recorded
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.health import findings
from lockstep.observability.health.process import phases_of, state_of
from lockstep.observability.health.run_view import RunView, Series
from lockstep.observability.numbers import number
from lockstep.observability.status_file import read_status

DOCS = Path(__file__).parents[4] / "docs"
"""The pages that findings name, in a checkout; an installed package does not have them."""
MOST_POINTS = 200
CURVES = (
    ("Reward", ("critic/score/mean", "critic/rewards/mean")),
    ("Validation", ("val-core/", "val/loss")),
    ("Entropy", ("actor/entropy",)),
    ("Response length", ("response_length/mean",)),
    ("Loss", ("train/loss",)),
    ("Accuracy", ("train/accuracy", "rewards/accuracies")),
    ("Gradient norm", ("train/grad_norm",)),
)
"""Title of a small chart, and its metric: the first that the run has; one that ends in / stands for the first mean below it."""


def status(request: ApiRequest) -> dict[str, Any]:
    """What the run is doing now. Cheap: asked for at every change."""
    run = request.run()
    raw = read_status(run.folder) or {}
    step, metrics = run.metrics.last()
    seconds = [value for each in _list(raw.get("step_seconds")) if (value := number(each)) is not None]
    return {
        "state": run_state(run),
        "reason": str(raw["reason"])[:2000] if raw.get("reason") else None,
        "step": max(step, int(number(raw.get("step")) or 0)),
        "total_steps": number(raw.get("total_steps")),
        "seconds_left": number(raw.get("seconds_left")),
        "step_seconds": sum(seconds) / len(seconds) if seconds else metrics.get("timing_s/step"),
        "throughput": metrics.get("perf/throughput"),
        "started": number(raw.get("started")),
        "time": number(raw.get("time")),
        "host": str(raw["host"])[:200] if raw.get("host") else None,
        "phases": phases_of(raw),
    }


def health(request: ApiRequest) -> dict[str, Any]:
    """docs: whether /docs/ serves the pages that findings name."""
    view = view_of(request.run())
    return {
        "state": state_of(view),
        "curves": main_curves(view),
        "findings": [asdict(each) for each in findings(view)],
        "docs": (DOCS / "metrics.md").is_file(),
    }


def main_curves(view: RunView) -> list[dict[str, Any]]:
    found = []
    for title, choices in CURVES:
        name = next((name for choice in choices if (name := _metric(view, choice)) is not None), None)
        if name is not None and (series := view.read(name).finite()).values:
            steps, values = thinned(series)
            found.append({"title": title, "metric": name, "step": steps, "value": values})
    return found[:4]


def _metric(view: RunView, choice: str) -> str | None:
    if not choice.endswith("/"):
        return choice if choice in view.names else None
    below = [name for name in view.names if name.startswith(choice)]
    return next((name for name in below if "/mean@" in name), below[0] if below else None)


def thinned(series: Series) -> Series:
    """At most `MOST_POINTS` values: means of neighbours, at their last step."""
    size = -(-len(series.steps) // MOST_POINTS)
    if size <= 1:
        return series
    starts = range(0, len(series.steps), size)
    parts = [Series(series.steps[begin : begin + size], series.values[begin : begin + size]) for begin in starts]
    return Series([part.steps[-1] for part in parts], [part.mean() for part in parts])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    for run in runs:
        yield Recorded("/api/status", {"run": run.name})
        yield Recorded("/api/health", {"run": run.name}, lambda answer: answer | {"docs": False})


ROUTES: dict[str, Api] = {"/api/status": status, "/api/health": health}
