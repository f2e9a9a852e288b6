"""verl.utils.metric.utils: metrics that say how they are aggregated."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch


class AggregationType(Enum):
    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_REDUCTIONS: dict[AggregationType, Callable[[Any], Any]] = {
    AggregationType.MEAN: np.mean,
    AggregationType.SUM: np.sum,
    AggregationType.MIN: np.min,
    AggregationType.MAX: np.max,
}


class Metric:
    """Numbers of one metric, such as one per micro-batch, and how they become one."""

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[Any] = []
        if value is not None:
            self.extend(value) if isinstance(value, list) else self.append(value)

    def append(self, value: Any) -> None:
        """Add a number, a tensor of one element, or the numbers of another metric."""
        if isinstance(value, Metric):
            self.extend(value)
            return
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"a metric is a number, not a tensor of shape {tuple(value.shape)}")
            value = value.detach().item()
        if not isinstance(value, int | float | np.number | np.ndarray):
            raise ValueError(f"a metric is a number, not a {type(value).__name__}")
        self.values.append(value)

    def extend(self, values: "Metric | Sequence[Any]") -> None:
        if isinstance(values, Metric):
            if values.aggregation is not self.aggregation:
                raise ValueError(f"a {values.aggregation.value} cannot be added to a {self.aggregation.value}")
            values = values.values
        for value in values:
            self.append(value)

    def aggregate(self) -> float:
        return float(_REDUCTIONS[self.aggregation](self.values))

    @staticmethod
    def aggregate_dp(metric_lists: "Sequence[Metric]") -> float:
        """One number from the metrics of all data-parallel ranks: sums and means are averaged over the ranks."""
        first = metric_lists[0].aggregation
        if len({len(metric.values) for metric in metric_lists}) != 1:
            raise ValueError(f"ranks have different numbers of values: {[len(m.values) for m in metric_lists]}")
        values = np.array([metric.values for metric in metric_lists])
        over_ranks = values.mean(0) if first in (AggregationType.SUM, AggregationType.MEAN) else values
        return float(_REDUCTIONS[first](over_ranks))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], aggregation: str | AggregationType) -> "dict[str, Metric]":
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> "Metric":
        """An empty metric of the same kind."""
        return Metric(self.aggregation)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number per name: of a `Metric` its own, otherwise the maximum for names with max, the minimum for names with min, and the
    mean for all others."""
    return {name: _reduced(name, values) for name, values in metrics.items()}


def _reduced(name: str, values: Any) -> float:
    if isinstance(values, Metric):
        return values.aggregate()
    return float((np.max if "max" in name else np.min if "min" in name else np.mean)(values))
