"""Curves of runs, from their metrics.jsonl: which metrics to draw, and their points.

metrics.jsonl ─► Run (values by step) ─► panels (one metric, one curve per run) ─► `chart` or `text_chart`
"""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lockstep.observability.step_line import format_number
from lockstep.observability.trackers import METRICS_FILE

Points = list[tuple[int, float]]
"""(step, value), by step."""

DEFAULT_METRICS = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "loss": ("train/loss",),
    "accuracy": ("train/accuracy", "rewards/accuracies"),
    "margin": ("train/margin", "rewards/margins"),
    "validation": ("val-core/*/mean@*", "val/accuracy", "val/rewards/accuracies", "val/loss"),
    "length": ("response_length/mean",),
    "entropy": ("actor/entropy",),
    "kl": ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
    "grad": ("actor/grad_norm", "train/grad_norm"),
    "time": ("timing_s/step",),
}
"""Short name -> patterns; the first one that a run has is drawn."""


@dataclass(frozen=True)
class Run:
    """values: step -> metric -> number. If a step has several lines, as after a resume, the last value counts."""

    name: str
    values: dict[int, dict[str, float]]

    @property
    def last_step(self) -> int:
        return max(self.values)

    @property
    def metrics(self) -> set[str]:
        return {name for values in self.values.values() for name in values}

    def points(self, metric: str) -> Points:
        return [(step, values[metric]) for step, values in sorted(self.values.items()) if metric in values]


@dataclass(frozen=True)
class Panel:
    """One metric. curves: run name -> its points, also for runs that have none."""

    metric: str
    curves: dict[str, Points]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of folders or metrics files, named by the shortest part of their path that tells them apart."""
    files = [path / METRICS_FILE if path.is_dir() else path for path in dict.fromkeys(paths)]
    return [Run(name, _read(file)) for name, file in zip(_names([file.resolve().parent for file in files]), files)]


def _read(file: Path) -> dict[int, dict[str, float]]:
    if not file.is_file():
        inner = sorted(path.parent for path in file.parent.glob(f"*/{METRICS_FILE}")) if file.parent.is_dir() else []
        hint = f"; runs in {file.parent}: {', '.join(path.name for path in inner[:3])}" if inner else ""
        raise ValueError(f"{file} does not exist: RUN is a run's folder or its {METRICS_FILE}{hint}")
    values: dict[int, dict[str, float]] = {}
    for line in file.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):  # the last line of a run that is still going, or was killed
            continue
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        values.setdefault(step, {}).update({name: numbers[name] for name in numbers.keys() - {"step", "time"}})
    if not values:
        raise ValueError(f"{file} has no complete step yet")
    return values


def _names(folders: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {folder.name}" for number, folder in enumerate(folders, start=1)]


def select_metrics(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """The metrics of names, short names (`reward`) or patterns (`timing_s/*`); without any, the main ones."""
    known = set().union(*(run.metrics for run in runs))
    chosen = [] if names else default_metrics(known)
    for name in names:
        patterns = (name, *DEFAULT_METRICS.get(name, ()))
        found = next((matches for pattern in patterns if (matches := _matching(pattern, known))), [])
        if not found:
            raise ValueError(f"--metric {name}: no run has it; {_nearest(name, known)}")
        chosen += found
    if not chosen:
        raise ValueError(f"the runs have none of the main metrics; choose some with --metric: {_listed(known)}")
    return list(dict.fromkeys(chosen))


def default_metrics(known: Iterable[str]) -> list[str]:
    """The main metrics among those that a run has."""
    known = set(known)
    groups = (
        next((found for pattern in patterns if (found := _matching(pattern, known))), [])
        for patterns in DEFAULT_METRICS.values()
    )
    return [name for found in groups for name in found]


def _matching(pattern: str, known: Iterable[str]) -> list[str]:
    return sorted(name for name in known if name == pattern or fnmatchcase(name, pattern))


def _nearest(name: str, known: set[str]) -> str:
    inside = sorted(metric for metric in known if name.lower() in metric.lower())
    near = inside or difflib.get_close_matches(name, sorted(known), n=5, cutoff=0.5)
    if near:
        return f"did you mean {_listed(near)}?"
    return f"short names are {', '.join(DEFAULT_METRICS)}; --list shows all {len(known)} metrics"


def _listed(names: Iterable[str], most: int = 5) -> str:
    names = sorted(names)
    more = f" or {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def panels(runs: Sequence[Run], metrics: Sequence[str], smooth: int = 1) -> list[Panel]:
    """smooth: each point is the mean of this many, ending with its own."""
    return [Panel(name, {run.name: moving_mean(run.points(name), smooth) for run in runs}) for name in metrics]


def moving_mean(points: Points, window: int) -> Points:
    means = []
    total = 0.0
    for number, (step, value) in enumerate(points):
        total += value - (points[number - window][1] if number >= window else 0.0)
        means.append((step, total / min(window, number + 1)))
    return means if window > 1 else points


def axis_number(value: float, span: float) -> str:
    """A number next to an axis that covers `span`, with enough digits to tell its neighbours apart."""
    if value == 0 or span == 0 or abs(value) < 10 * span:
        return format_number(value)
    return f"{value:.{3 + math.floor(math.log10(abs(value) / span))}g}"
