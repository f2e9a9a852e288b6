"""Accuracy of scored responses: the metrics of a validation, pass@k, and 95 % confidence intervals over the prompts."""

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

from lockstep.trainer.ppo.metrics import BOOTSTRAP_SEED, NUM_BOOTSTRAP, core_variable, prompt_metrics, subset_sizes
from lockstep.trainer.ppo.validation import Responses

Z95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""

Intervals = dict[str, list[float]]
"""Metric -> lower and upper bound."""

PREFIXES = ("val-core", "val-aux")
KINDS = ("mean@", "pass@", "maj@", "best@")
"""Metrics with an interval, in the order of the table."""


def accuracy(responses: Responses, correct_score: float) -> tuple[dict[str, float], Intervals]:
    """The metrics of a validation, by the same code, with pass@k and verl's `test_score/{source}`; intervals of the main ones."""
    metrics = responses.metrics()
    intervals: Intervals = {}
    variables = responses.variables
    for source, by_variable in prompt_metrics(responses.data_sources, responses.uids, variables).items():
        main = core_variable(by_variable)
        passed = pass_at_k(prompts_of(responses)[source], variables[main], correct_score)
        metrics |= {f"val-core/{source}/{main}/{name}": float(np.mean(values)) for name, values in passed.items()}
        of_prompts = {**by_variable[main], **passed}
        for name in (n for kind in KINDS for n in of_prompts if n.startswith(kind) and not n.endswith("/std")):
            full = next(f"{p}/{source}/{main}/{name}" for p in PREFIXES if f"{p}/{source}/{main}/{name}" in metrics)
            intervals[full] = confidence_interval(of_prompts[name])
        means = [v for name, values in by_variable["reward"].items() if name.startswith("mean@") for v in values]
        metrics[f"test_score/{source}"] = float(np.mean(means))
    return metrics, intervals


def prompts_of(responses: Responses) -> dict[str, dict[str, list[int]]]:
    """Data source -> prompt -> numbers of its responses."""
    found: dict[str, dict[str, list[int]]] = {}
    for number, (source, uid) in enumerate(zip(responses.data_sources, responses.uids)):
        found.setdefault(source, {}).setdefault(uid, []).append(number)
    return found


def pass_at_k(
    prompts: Mapping[str, Sequence[int]], values: Sequence[Any], correct_score: float
) -> dict[str, list[float]]:
    """pass@k of each prompt for k = 1, 2, 4, .. and the number n of its responses: the chance that one of k responses, drawn
    without replacement, is correct: 1 - C(n - c, k) / C(n, k) with c correct ones (arXiv 2107.03374).

    correct_score: a response is correct if its value is at least this.
    """
    result: dict[str, list[float]] = {}
    for rows in prompts.values():
        present = [float(values[row]) for row in rows if values[row] is not None]
        n, correct = len(present), sum(value >= correct_score for value in present)
        for k in dict.fromkeys([1, *subset_sizes(n)]) if n else ():
            result.setdefault(f"pass@{k}", []).append(1.0 - comb(n - correct, k) / comb(n, k))
    return result


def confidence_interval(values: Sequence[float]) -> list[float]:
    """95 % interval of the mean: Wilson's if every value is 0 or 1, else by bootstrap over the prompts with a fixed seed."""
    array = np.asarray(values, dtype=np.float64)
    n, mean = len(array), float(array.mean())
    if np.isin(array, (0.0, 1.0)).all():
        centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * float(np.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n)))
        return [max(0.0, centre - half), min(1.0, centre + half)]
    draws = np.random.RandomState(BOOTSTRAP_SEED)
    means = [array[draws.choice(n, n)].mean() for _ in range(NUM_BOOTSTRAP)]
    return [float(bound) for bound in np.percentile(means, (2.5, 97.5))]
