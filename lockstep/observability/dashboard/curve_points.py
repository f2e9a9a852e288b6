"""The points of one curve: what they are drawn over, and at most `MOST_POINTS` of them.

column of a metric ─► points that show it (extremes and what is no number stay) ─► their step, samples, tokens and hours
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.observability.compare import read_config
from lockstep.observability.dashboard.metrics_store import MetricsStore
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.run_folder import starts

MOST_POINTS = 2000
TOKENS = ("perf/total_num_tokens", "train/global_tokens")
"""Metrics that count the tokens of a step; the first that a run has is used."""


def curve_of(run: RunFolder, metric: str) -> dict[str, Any]:
    """The curve as JSON. `means`: of the buckets of a curve that was thinned, for smoothing; values have ten digits."""
    steps, values, times = run.metrics.arrays(metric)
    axes = {
        "step": steps,
        "samples": samples_at(run.folder, steps),
        "tokens": tokens_at(run.metrics, steps),
        "hours": (times - run.metrics.first_time()) / 3600,
    }
    kept = shown_points(values)
    size = bucket_size(len(values))
    return {
        "points": len(values),
        "non_finite": int((~np.isfinite(values)).sum()),
        **{name: _listed(axis[kept]) for name, axis in axes.items() if axis is not None},
        "value": _listed(values[kept]),
        "means": None
        if size == 1
        else {
            "size": size,
            **{
                name: _listed(axis[_last_of_buckets(len(values), size)])
                for name, axis in axes.items()
                if axis is not None
            },
            "value": _listed(bucket_means(values, size)),
        },
    }


def _listed(values: np.ndarray) -> list[Any]:
    if values.dtype.kind == "i":
        return values.tolist()
    return [float(f"{value:.10g}") for value in values.tolist()]


def bucket_size(num_points: int) -> int:
    """Neighbours that are thinned together; 1 if all of them are shown. A bucket keeps up to three, and both ends are kept."""
    return 1 if num_points <= MOST_POINTS else math.ceil(num_points / ((MOST_POINTS - 2) // 3))


def shown_points(values: np.ndarray) -> np.ndarray:
    """Indices of at most `MOST_POINTS`: the lowest, the highest and the first non-finite value of each bucket, and both ends."""
    size = bucket_size(len(values))
    if size == 1:
        return np.arange(len(values))
    buckets = _buckets(values, size)
    inside = np.arange(buckets.size).reshape(buckets.shape) < len(values)
    finite = np.isfinite(buckets) & inside
    odd = ~finite & inside
    starts_at = np.arange(len(buckets)) * size
    some = finite.any(axis=1)
    low = (starts_at + np.where(finite, buckets, np.inf).argmin(axis=1))[some]
    high = (starts_at + np.where(finite, buckets, -np.inf).argmax(axis=1))[some]
    first_odd = (starts_at + odd.argmax(axis=1))[odd.any(axis=1)]
    return np.unique(np.concatenate([low, high, first_odd, [0, len(values) - 1]]))


def bucket_means(values: np.ndarray, size: int) -> np.ndarray:
    """The mean of the finite values of each bucket; NaN if it has none."""
    buckets = _buckets(values, size)
    finite = np.isfinite(buckets)
    counts = finite.sum(axis=1)
    sums = np.where(finite, buckets, 0.0).sum(axis=1)
    return np.divide(sums, counts, out=np.full(len(buckets), np.nan), where=counts > 0)


def _buckets(values: np.ndarray, size: int) -> np.ndarray:
    return np.append(values, np.full(-len(values) % size, np.nan)).reshape(-1, size)


def _last_of_buckets(num_points: int, size: int) -> np.ndarray:
    return np.minimum(np.arange(size, num_points + size, size), num_points) - 1


def tokens_at(metrics: MetricsStore, steps: np.ndarray) -> np.ndarray | None:
    """Tokens of the run up to each step; None if it does not log them."""
    for name in TOKENS:
        counted = metrics.arrays(name)
        if len(counted.steps):
            total = np.cumsum(np.nan_to_num(counted.values, posinf=0.0, neginf=0.0))
            return np.append(0.0, total)[np.searchsorted(counted.steps, steps, side="right")].astype(np.int64)
    return None


def samples_at(run: Path, steps: np.ndarray) -> np.ndarray | None:
    """Samples trained on up to each step, from the batch sizes of the configs; None if one of them is not known."""
    begun = starts(run)
    total = np.zeros(len(steps), np.int64)
    for number, (start, config) in enumerate(begun):
        end = min(
            (later for later, _ in begun[number + 1 :]), default=2**53
        )  # a start from an earlier step replaces what followed it
        if end <= start:
            continue
        try:
            size = samples_per_step(config, config.stat().st_mtime_ns)
        except OSError:
            return None
        if size is None:
            return None
        total += size * np.clip(np.minimum(steps, end) - start, 0, None)
    return total


@lru_cache(maxsize=256)
def samples_per_step(config: Path, mtime_ns: int) -> int | None:
    """mtime_ns: of the file, so that it is read again if it changes."""
    try:
        settings = read_config(config)
    except ValueError:
        return None
    size = settings.get("data.train_batch_size")
    n = settings.get("actor_rollout_ref.rollout.n", 1)
    return size * n if type(size) is int and type(n) is int and 0 < size * n < 2**31 else None
