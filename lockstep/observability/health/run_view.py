"""What rules read (`RunView`), what they say (`Finding`), and their statistics."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from lockstep.observability.numbers import number

Severity = Literal["bad", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("bad", "warning", "info")

RECENT = 10
"""Steps that count as now."""
WATCH = "metrics.md#what-to-watch"
"""The page of most findings about training."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    rule:     its name.
    title:    a few words; text: a sentence with the numbers; advice: what to try, with the keys.
    metrics:  the curves that show it; steps: the range to look at.
    rollouts: filter of the dumped samples that show it, as the rollouts panel takes it; None if samples do not.
    docs:     page and anchor below docs/.
    """

    rule: str
    severity: Severity
    title: str
    text: str
    advice: str
    docs: str
    metrics: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    rollouts: Mapping[str, str] | None = None


class Series(NamedTuple):
    """A metric by step; values may be NaN."""

    steps: Sequence[int]
    values: Sequence[float]

    def finite(self) -> "Series":
        if all(map(math.isfinite, self.values)):
            return self
        rows = [(step, value) for step, value in zip(self.steps, self.values) if math.isfinite(value)]
        return Series([step for step, _ in rows], [value for _, value in rows])

    def last(self, count: int = RECENT) -> "Series":
        return Series(self.steps[-count:], self.values[-count:])

    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def span(self) -> tuple[int, int]:
        return self.steps[0], self.steps[-1]


@dataclass(frozen=True)
class RunView:
    """A run as rules see it.

    read:     the values of a metric; empty if the run does not have it.
    names:    of all its metrics.
    settings: its config.yaml; status, plan: its status.json and plan.json, as they were read.
    now:      seconds since 1970.
    is_alive: whether the process of the status exists; None if that cannot be known, as on another machine.
    audit_dumps: folders of the batches that audits have kept.
    """

    read: Callable[[str], Series]
    names: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    now: float = 0.0
    is_alive: bool | None = None
    audit_dumps: Sequence[str] = ()
    _known: dict[str, Series] = field(default_factory=dict, compare=False, repr=False)

    def series(self, name: str) -> Series:
        """The finite values of a metric, of training steps: those from 1 on."""
        if name not in self._known:
            found = self.read(name).finite()
            begin = next((i for i, step in enumerate(found.steps) if step >= 1), len(found.steps))
            self._known[name] = Series(found.steps[begin:], found.values[begin:])
        return self._known[name]

    def setting(self, key: str) -> Any:
        """None if the config lacks it."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def samples(self, **filters: str) -> dict[str, str] | None:
        """A filter of dumped training samples; None if the run dumps none."""
        return filters if self.setting("trainer.rollout_data_dir") else None

    def planned(self, section: str) -> dict[str, float]:
        """A section of the plan that maps phases to numbers."""
        found = self.plan.get(section) if self.plan is not None else None
        rows = found.items() if isinstance(found, Mapping) else ()
        return {str(name): value for name, raw in rows if (value := number(raw)) is not None}


class Trend(NamedTuple):
    """change: over the values, by least squares; error: its standard error."""

    change: float
    error: float

    @property
    def is_rise(self) -> bool:
        return self.change > 4 * self.error

    @property
    def is_fall(self) -> bool:
        return -self.change > 4 * self.error


def trend(values: Sequence[float]) -> Trend:
    """Of three values or more. The error counts neighbours that are alike (autocorrelated residuals) as fewer values."""
    count = len(values)
    centre = (count - 1) / 2
    mean = sum(values) / count
    spread = sum((i - centre) ** 2 for i in range(count))
    slope = sum((i - centre) * (value - mean) for i, value in enumerate(values)) / spread
    rest = [value - mean - slope * (i - centre) for i, value in enumerate(values)]
    squares = sum(value * value for value in rest)
    alike = sum(a * b for a, b in pairwise(rest)) / squares if squares > 0 else 0.0
    alike = min(max(alike, 0.0), 0.9)
    deviation = math.sqrt(squares / max(count - 2, 1) / spread * (1 + alike) / (1 - alike))
    return Trend(slope * (count - 1), deviation * (count - 1))


def noise(values: Sequence[float]) -> float:
    """Standard deviation from step to step, without the trend."""
    steps = [b - a for a, b in pairwise(values)]
    return statistics.pstdev(steps) / math.sqrt(2) if len(steps) > 1 else 0.0


def show(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.1g} %"
