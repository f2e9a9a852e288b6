"""How the metrics of workers are reduced over ranks: the producer says so by the type of the value."""

from collections.abc import Mapping
from statistics import fmean


class MaxOverRanks(float):
    """A metric of which the largest value of all ranks is reported, such as a peak; of plain numbers it is the mean."""


class MinOverRanks(float):
    """A metric of which the smallest value of all ranks is reported, such as a limit."""


def reduced_over_ranks(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """metrics: name to the values of all ranks, or to the value of a single one."""
    per_rank = {name: value if isinstance(value, list) else [value] for name, value in metrics.items()}
    return {name: _reduced(values) for name, values in per_rank.items()}


def _reduced(values: list[float]) -> float:
    if isinstance(values[0], MaxOverRanks):
        return float(max(values))
    if isinstance(values[0], MinOverRanks):
        return float(min(values))
    return fmean(values)
