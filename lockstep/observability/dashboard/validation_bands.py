"""Confidence bands of validation means, from the dumps of the validations.

mean@n of a validation is the mean over prompts of each prompt's mean over n responses. With P prompts, whose means have the
standard deviation s (P - 1 degrees of freedom), its standard error is s / sqrt(P): it covers both which prompts the data has and
what was sampled for them. The band is the mean +- 1.96 standard errors (95 %). A step has none if its dump is missing, or if the
mean of the dump is not the logged one (several data sources in a dump that does not name them, or a dump of another run).
"""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.rollout_files import number_in
from lockstep.utils.untrusted import JSON_ERRORS

WIDTH = 1.96
MOST_BYTES = 64 << 20
"""Of dumps that are read per request, newest first; a later request reads on, since what was read is kept."""
MOST_KEPT = 4096
MEAN = re.compile(r"val-(?:core|aux)/(?P<source>.+)/(?P<variable>[^/]+)/mean@(?P<n>\d+)")

PromptMeans = dict[tuple[str | None, str, int], tuple[int, float, float]]
"""(data source, variable, n) -> number of prompts, their mean, its standard error. The source is None if the dump has none."""


def band_of(run: RunFolder, metric: str) -> dict[str, Any]:
    """`unread`: dumps that were not read yet."""
    match = MEAN.fullmatch(metric)
    rows: list[tuple[int, float, float, int]] = []
    unread = 0
    if match is not None:
        try:
            dumps = run.rollouts.files("validation")
        except ValueError:  # the run has no config
            dumps = {}
        steps, values, _ = run.metrics.column(metric)
        source, variable, n = match["source"], match["variable"], int(match["n"])
        left = MOST_BYTES
        for step, value in sorted(zip(steps, values), reverse=True):
            if step not in dumps or not math.isfinite(value):
                continue
            means, left = _within(dumps[step], left)
            if means is None:
                unread += 1
                continue
            found = means.get((source, variable, n)) or means.get((None, variable, n))
            if found is not None and math.isclose(found[1], value, rel_tol=1e-5, abs_tol=1e-6):
                num_prompts, _, error = found
                rows.append((step, value - WIDTH * error, value + WIDTH * error, num_prompts))
    rows.reverse()
    names = ("step", "low", "high", "prompts")
    return {name: [row[index] for row in rows] for index, name in enumerate(names)} | {"unread": unread}


_read: dict[tuple[Path, int, int], PromptMeans] = {}
"""By file, size and mtime. Other threads may clear it at any time."""


def _within(path: Path, left: int) -> tuple[PromptMeans | None, int]:
    """What the dump says and the bytes that may still be read; None if it is too large for them."""
    try:
        found = path.stat()
        key = (path, found.st_size, found.st_mtime_ns)
        known = _read.get(key)
        if known is not None:
            return known, left
        if found.st_size > left:
            return ({} if found.st_size > MOST_BYTES else None), left
        if len(_read) >= MOST_KEPT:
            _read.clear()
        means = _read[key] = _prompt_means(path.read_bytes().split(b"\n"))
        return means, left - found.st_size
    except OSError:
        return {}, left


def _prompt_means(lines: Iterable[bytes]) -> PromptMeans:
    values: dict[tuple[str | None, str], dict[str, list[float]]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            prompt = str(row.get("uid", row.get("input")))
            source = row.get("data_source")
        except (*JSON_ERRORS, AttributeError):
            continue
        for name in row:
            if math.isfinite(value := number_in(row, name)):
                key = (None if source is None else str(source), "reward" if name == "score" else name)
                values.setdefault(key, {}).setdefault(prompt, []).append(value)
    result: PromptMeans = {}
    for (source, name), by_prompt in values.items():
        for n in {len(responses) for responses in by_prompt.values()}:
            means = [sum(responses) / n for responses in by_prompt.values() if len(responses) == n]
            if len(means) > 1:
                error = float(np.std(means, ddof=1)) / math.sqrt(len(means))
                result[source, name, n] = (len(means), float(np.mean(means)), error)
    return result
