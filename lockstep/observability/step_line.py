"""Format the main metrics of a step as one short line."""

from dataclasses import dataclass
from typing import Any

from lockstep.observability.tracker import Metrics, numbers_of, plain
from lockstep.utils.untrusted import printable

VALIDATION_PREFIXES = ("val-core/", "val/")
UNKNOWN_SHOWN = 6


@dataclass(frozen=True)
class Field:
    """One number of the line. keys: metric names; the first one present is shown. unit: appended to the number."""

    label: str
    keys: tuple[str, ...]
    unit: str = ""


FIELDS = (
    Field("reward", ("critic/score/mean", "critic/rewards/mean")),
    Field("length", ("response_length/mean",)),
    Field("turns", ("num_turns/mean",)),
    Field("tool calls", ("tool_call_counts/mean",)),
    Field("loss", ("actor/pg_loss", "train/loss")),
    Field("accuracy", ("train/accuracy", "rewards/accuracies")),
    Field("margin", ("train/margin", "rewards/margins")),
    Field("ref kl", ("actor/reward_kl_penalty", "actor/kl_loss")),
    Field("ppo kl", ("actor/ppo_kl",)),
    Field("entropy", ("actor/entropy",)),
    Field("grad", ("actor/grad_norm", "train/grad_norm")),
    Field("value loss", ("critic/vf_loss",)),
    Field("", ("perf/throughput",), " tok/s"),
    Field("", ("timing_s/step", "perf/time_per_step", "train/time(s)"), " s"),
)


def step_parts(data: Metrics) -> list[str]:
    """The known fields in `data`; if there are none and no validation metrics either, its first few metrics."""
    parts = []
    for field in FIELDS:
        if (value := first_number(data, field.keys)) is not None:
            parts.append(f"{field.label} {format_number(value)}{field.unit}".strip())
    if not parts and not validation_parts(data):
        numbers = [(name, value) for name, value in numbers_of(data).items() if not name.startswith("val-")]
        parts = [f"{name} {format_number(value)}" for name, value in numbers[:UNKNOWN_SHOWN]]
    return parts


def validation_parts(data: Metrics) -> list[str]:
    """The core validation metrics as `{data_source}/{variable}/{metric} value`."""
    core = {name: value for name, value in data.items() if name.startswith(VALIDATION_PREFIXES)}
    parts = []
    for name, value in numbers_of(core).items():
        prefix = next(prefix for prefix in VALIDATION_PREFIXES if name.startswith(prefix))
        parts.append(f"{printable(name.removeprefix(prefix))} {format_number(value)}")
    return parts


def first_number(data: Metrics, keys: tuple[str, ...]) -> float | None:
    numbers = numbers_of({key: data[key] for key in keys if key in data})
    return next(iter(numbers.values()), None)


def format_number(value: float) -> str:
    """Three significant digits: 0.41, 346, 12,345, 2.1e-05."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 1e7 or 0 < abs(value) < 1e-4:
        return f"{value:.1e}"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value + 0.0:.3g}"


def format_seconds(seconds: float) -> str:
    """45 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def one_line(value: Any, max_chars: int) -> str:
    """Any text as one printable line; model output may contain line breaks and terminal escapes."""
    text = printable(" ".join(str(plain(value)).split()))
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def sparkline(values: list[float]) -> str:
    """`values` as a sparkline, one character each, scaled from minimum to maximum."""
    bars = "▁▂▃▄▅▆▇█"
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(bars[round((value - low) / span * (len(bars) - 1)) if span else 0] for value in finite)
