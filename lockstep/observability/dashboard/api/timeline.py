"""The panel "Time and memory": the spans of a step, what the phases took over the run, and memory by phase beside the plan."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.dashboard.request import Api, ApiRequest, NotFound, Recorded
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.dashboard.timeline_reader import read_step
from lockstep.observability.glossary import explain
from lockstep.observability.health.process import GIB, TIMERS
from lockstep.observability.numbers import number
from lockstep.observability.run_folder import PLAN
from lockstep.observability.status_file import read_json
from lockstep.observability.timeline import Steps, drawing, parse_numbers, tracks_of
from lockstep.utils.spans import Span, Track

MOST_ROWS = 64
MOST_SPANS = 4000
MOST_POINTS = 400
"""Of a curve: of longer runs each point is the mean of several steps."""
RECORDED_STEPS = 20
"""Of an exported page."""


TIMING, STEP = "timing_s/", "timing_s/step"
GENERATION = "timing_s/gen"
"""Only RL has it."""
SAVING, VALIDATION = "timing_s/save_checkpoint", "timing_s/testing"
PEAK, USED = "perf/max_memory_allocated_gb/", "perf/memory_used_gb/"
SINCE_START = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")


def timeline(request: ApiRequest) -> dict[str, Any]:
    """One step, by default the newest: at most `MOST_ROWS` rows, of all ranks or of `ranks`; numbers over all ranks beside it."""
    step = request.number("step") if "step" in request.params else None
    run = request.run()
    try:
        found = read_step(run.folder, step)
    except FileNotFoundError:
        raise NotFound("this run has written no timeline.jsonl yet") from None
    tracks = tracks_of({found.step: found.spans})
    shown = set(_chosen(tracks, request.text("ranks", "")))
    spans = [span for span in found.spans if (span.role, span.rank) in shown]
    kept = _longest(spans)
    steps: Steps = {found.step: kept}
    return {
        "step": found.step,
        "previous": found.previous,
        "next": found.following,
        "last": found.last,
        "num_rows": len(tracks),
        "spans_left_out": len(spans) - len(kept),
        "calls": _calls(found.spans),
        **drawing(steps),
    }


def _chosen(tracks: Sequence[Track], ranks: str) -> list[Track]:
    """The rows to show: the controller, and the first ranks of every role; `ranks` selects others."""
    if ranks.strip():
        ranges = parse_numbers(ranks, "ranks")
        tracks = [
            (role, rank) for role, rank in tracks if role == "controller" or any(rank in numbers for numbers in ranges)
        ]
        if not tracks:
            raise ValueError(f"the step has no rank {ranks}")
    return sorted(tracks, key=lambda track: (track[0] != "controller", track[1]))[:MOST_ROWS]


def _longest(spans: list[Span]) -> list[Span]:
    if len(spans) <= MOST_SPANS:
        return spans
    shortest_kept = sorted((span.end_us - span.begin_us for span in spans), reverse=True)[MOST_SPANS - 1]
    return [span for span in spans if span.end_us - span.begin_us >= shortest_kept][:MOST_SPANS]


def _calls(spans: list[Span]) -> list[dict[str, Any]]:
    """Per role and name: seconds of each rank together, from the fastest to the slowest rank."""
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    for span in spans:
        ranks = seconds.setdefault((span.role, span.name), {})
        ranks[span.rank] = ranks.get(span.rank, 0.0) + (span.end_us - span.begin_us) / 1e6
    rows = []
    for (role, name), ranks in list(seconds.items())[:200]:
        slowest = max(ranks, key=ranks.__getitem__)
        fastest = min(ranks, key=ranks.__getitem__)
        rows.append(
            {
                "role": role,
                "name": name,
                "ranks": len(ranks),
                "mean": _short(sum(ranks.values()) / len(ranks)),
                "min": _short(ranks[fastest]),
                "max": _short(ranks[slowest]),
                "fastest": fastest,
                "slowest": slowest,
            }
        )
    return rows


def time_over_run(request: ApiRequest) -> dict[str, Any]:
    """Seconds of each phase per step, throughput, and the numbers of asynchronous training."""
    metrics = request.run().metrics
    names = metrics.names()
    steps, totals, _ = metrics.column(STEP)
    bins = _bins(steps)
    phases = [name for name in names if name.startswith(TIMING) and name != STEP]
    columns = {name: _mean_per_step(metrics, name, steps, bins) for name in phases}
    whole = [sum(totals[first:last]) / (last - first) for first, last in bins]
    after_step = (SAVING,) if GENERATION in names else (SAVING, VALIDATION)  # the step of RL includes validation
    inside = [column for name, column in columns.items() if name not in after_step]
    rest = [max(0.0, total - sum(values)) for total, *values in zip(whole, *inside)]
    rows = [
        {"name": name.removeprefix(TIMING), "meaning": explain(name), "seconds": _shortened(column)}
        for name, column in sorted(columns.items(), key=lambda item: -sum(item[1]))
    ]
    if any(rest):
        rows.append(
            {"name": "other", "meaning": "the rest of the step, on the controller", "seconds": _shortened(rest)}
        )
    return {
        "step": [steps[last - 1] for _, last in bins],
        "steps_per_point": bins[0][1] if bins else 1,
        "phases": rows,
        "throughput": _curve(metrics, "perf/throughput"),
        "async": [_curve(metrics, name) for name in names if name.startswith("async/")],
    }


def _bins(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of indexes, at most `MOST_POINTS`."""
    size = math.ceil(len(steps) / MOST_POINTS) or 1
    return [(first, min(first + size, len(steps))) for first in range(0, len(steps), size)]


def _mean_per_step(metrics: MetricsStore, name: str, steps: list[int], bins: list[tuple[int, int]]) -> list[float]:
    """0 for steps without the phase, such as those without validation."""
    found, values, _ = metrics.column(name)
    by_step = {step: value for step, value in zip(found, values) if math.isfinite(value)}
    return [sum(by_step.get(step, 0.0) for step in steps[first:last]) / (last - first) for first, last in bins]


def _curve(metrics: MetricsStore, name: str) -> dict[str, Any]:
    """Means of the finite values; a metric that the run lacks is empty."""
    found, all_values, _ = metrics.column(name)
    pairs = [(step, value) for step, value in zip(found, all_values) if math.isfinite(value)]
    steps, values = [step for step, _ in pairs], [value for _, value in pairs]
    bins = _bins(steps)
    means = [sum(values[first:last]) / (last - first) for first, last in bins]
    return {
        "name": name,
        "meaning": explain(name),
        "step": [steps[last - 1] for _, last in bins],
        "value": _shortened(means),
    }


def memory(request: ApiRequest) -> dict[str, Any]:
    """GiB by phase, and median seconds by phase, each beside the plan if the run wrote one, whose gigabytes have 1e9 bytes."""
    run = request.run()
    plan, problem = _plan(run)
    planned_gb = {phase: _short(gb / GIB) for phase, gb in _of_phases(plan.get("memory_gb")).items()}
    planned_s = _of_phases(plan.get("seconds")) | _of_phases({"step": plan.get("step_seconds")})
    names = run.metrics.names()
    peaks = {name.removeprefix(PEAK) for name in names if name.startswith(PEAK)}
    timed = {name.removeprefix(TIMING) for name in names if name.startswith(TIMING)}
    return {
        "gpu": plan.get("gpu") if isinstance(plan.get("gpu"), str) else None,
        "gpu_memory_gib": next(
            (_short(gb / GIB) for gb in _of_phases({"gpu": plan.get("gpu_memory_gb")}).values()), None
        ),
        "plan_problem": problem,
        "has_plan": bool(plan),
        "memory": [
            {"phase": phase, "planned": planned_gb.get(phase)} | _memory_of(run.metrics, phase)
            for phase in sorted(peaks | planned_gb.keys())
        ],
        "since_start": {name: _largest(run.metrics, name) for name in SINCE_START if name in names},
        "seconds": [
            {"phase": phase, "planned": planned_s.get(phase), "median": _median(run.metrics, TIMING + phase)}
            for phase in sorted(timed | planned_s.keys())
        ],
    }


def _memory_of(metrics: MetricsStore, phase: str) -> dict[str, Any]:
    """peak: the largest of the run; last, used: of its last step, allocated by the run and in use by all processes."""
    _, used, _ = metrics.column(USED + phase)
    _, peaks, _ = metrics.column(PEAK + phase)
    return {
        "peak": _largest(metrics, PEAK + phase),
        "last": _short(peaks[-1]) if peaks else None,
        "used": _short(used[-1]) if used else None,
    }


def _largest(metrics: MetricsStore, name: str) -> float | None:
    _, values, _ = metrics.column(name)
    return _short(max((value for value in values if math.isfinite(value)), default=math.nan))


def _median(metrics: MetricsStore, name: str) -> float | None:
    _, values, _ = metrics.column(name)
    finite = [value for value in values if math.isfinite(value)]
    return _short(median(finite)) if finite else None


def _plan(run: RunFolder) -> tuple[dict[str, Any], str | None]:
    """What `plan.json` says, and what is wrong with it."""
    path = run.folder / PLAN
    if (plan := read_json(path)) is not None:
        return plan, None
    return {}, f"{PLAN} cannot be read: it is no JSON object" if os.path.exists(path) else None


def _of_phases(table: object) -> dict[str, float]:
    """The numbers of a plan, by the metrics' names of phases."""
    if not isinstance(table, dict):
        return {}
    return {
        (TIMERS.get(name) or name).removeprefix(TIMING): value
        for name, raw in list(table.items())[:200]
        if (value := number(raw)) is not None
    }


def _short(value: float) -> float | None:
    """Five digits are enough to draw; None if it is no number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _shortened(values: Sequence[float]) -> list[float | None]:
    return [_short(value) for value in values]


def recorded(runs: Sequence[RunFolder]) -> Iterator[Recorded]:
    """The curves of all runs, then their last steps."""
    for run in runs:
        yield from (Recorded(path, {"run": run.name}) for path in ("/api/time", "/api/memory", "/api/timeline"))
    for run in runs:
        with suppress(OSError, ValueError):
            step: int | None = read_step(run.folder).step
            for _ in range(RECORDED_STEPS):
                if step is None:
                    break
                yield Recorded("/api/timeline", {"run": run.name, "step": str(step)})
                step = read_step(run.folder, step).previous


ROUTES: dict[str, Api] = {"/api/timeline": timeline, "/api/time": time_over_run, "/api/memory": memory}
