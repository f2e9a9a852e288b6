"""What differs: a step's metrics and dumps from the log, and two recordings, tensor by tensor in the order of the step."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.observability.token_file import token_path

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.trainer.replay.recording import Digest, Item, Recording

LEFT_OUT = (
    *("step", "time", "timing", "perf/", "checkpoint/", "weight_sync/send_s", "weight_sync/canary_s", "audit/"),
    *("async/trainer_wait_share", "async/rollout_wait_share", "async/queue_length", "async/running_groups"),
    *("async/stale_groups", "async/filtered_groups", "training/restarts", "training/agent_workers_replaced"),
)
"""Beginnings of the metrics that are not compared: timings, memory, throughput, counts since a process began, and findings of
audits, which may compare with steps before the checkpoint."""
OF_ROLLOUT_LOG_PROBS = (
    *("training/rollout_log_probs_gap", "training/rollout_probs_diff_", "training/rollout_gap/"),
    *("rollout_corr/", "weight_sync/canary_gap"),
)
"""Beginnings of the metrics of the rollout's log-probs, whose last bits depend on timing in conversations and with drafts from
history (docs/reliability.md)."""
MOST_ABSOLUTE, MOST_RELATIVE = 1e-4, 1e-3
"""What counts as rounding, where the bits depend on timing or on the number of processes."""

Verdict = Literal["equal", "rounding", "differs"]


@dataclass(frozen=True)
class MetricChange:
    """A metric in two versions of a step; None if one lacks it."""

    name: str
    old: Any
    new: Any
    verdict: Verdict

    @property
    def difference(self) -> float | None:
        if _is_number(self.old) and _is_number(self.new):
            return float(self.new) - float(self.old)
        return None

    @property
    def relative(self) -> float:
        """Relative to the larger one; infinite if there is no difference to tell."""
        if self.difference is None or math.isnan(self.difference):
            return 0.0 if self.verdict == "equal" else math.inf
        largest = max(abs(self.old), abs(self.new))
        return abs(self.difference) / largest if largest else 0.0


def compare_metrics(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    rollout_rounds: bool = False,
    rounds: bool = False,
    left_out: Sequence[str] = (),
) -> list[MetricChange]:
    """Every metric that is compared, largest relative difference first.

    rollout_rounds: metrics of the rollout's log-probs may differ by rounding. rounds: all may.
    left_out: beginnings of further metrics that are not compared.
    """
    changes = []
    for name in dict.fromkeys([*old, *new]):
        if name.startswith((*LEFT_OUT, *left_out)):
            continue
        before, after = old.get(name), new.get(name)
        allowed = rounds or (rollout_rounds and name.startswith(OF_ROLLOUT_LOG_PROBS))
        is_there = name in old and name in new
        verdict: Verdict = "differs"
        if is_there and _same(before, after):
            verdict = "equal"
        elif is_there and allowed and _close(before, after):
            verdict = "rounding"
        changes.append(MetricChange(name, before, after, verdict))
    return sorted(changes, key=lambda change: (change.verdict == "equal", -change.relative, change.name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(old: Any, new: Any) -> bool:
    """NaN is the same as NaN, also in lists."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_same(*pair) for pair in zip(old, new))
    both_nan = isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new)
    return both_nan or bool(old == new)


def _close(old: Any, new: Any) -> bool:
    if not (_is_number(old) and _is_number(new)):
        return False
    return math.isclose(old, new, rel_tol=MOST_RELATIVE, abs_tol=MOST_ABSOLUTE)


def first_different_steps(old: Mapping[int, Mapping[str, Any]], new: Mapping[int, Mapping[str, Any]]) -> Iterator[int]:
    """The training steps that both logs have and whose metrics differ, first to last."""
    for step in sorted(old.keys() & new.keys()):
        rollout_rounds = not old[step].keys().isdisjoint(("num_turns/mean", "perf/drafts/share"))
        changes = compare_metrics(old[step], new[step], rollout_rounds=rollout_rounds)
        if step > 0 and any(change.verdict == "differs" for change in changes):
            yield step


@dataclass(frozen=True)
class DumpDifference:
    """Rows of a dump that differ. columns: those in which they do."""

    file: Path
    rows: list[int]
    columns: list[str]


def compare_dumps(old: Path, new: Path, *, rollout_rounds: bool = False) -> list[DumpDifference]:
    """The responses of a step and, if both have them, their tokens. old, new: `{step}.jsonl`."""
    found = []
    before, after = ([json.loads(line) for line in file.read_bytes().splitlines()] for file in (old, new))
    found.append(_rows_that_differ(old, before, after, set()))
    if token_path(old).is_file() and token_path(new).is_file():
        import pyarrow.parquet as parquet

        before, after = (parquet.read_table(token_path(file)).to_pylist() for file in (old, new))
        rounds = {"rollout_log_probs"} if rollout_rounds else set()
        found.append(_rows_that_differ(token_path(old), before, after, rounds))
    return [difference for difference in found if difference is not None]


def _rows_that_differ(
    file: Path, old: list[dict[str, Any]], new: list[dict[str, Any]], left_out: set[str]
) -> DumpDifference | None:
    rows: list[int] = []
    columns: dict[str, None] = {}
    for number in range(max(len(old), len(new))):
        before = old[number] if number < len(old) else {}
        after = new[number] if number < len(new) else {}
        names = [n for n in {**before, **after} if n not in left_out and not _same(before.get(n), after.get(n))]
        if names:
            rows.append(number)
            columns |= dict.fromkeys(names)
    return DumpDifference(file, rows, list(columns)) if rows else None


@dataclass(frozen=True)
class TensorChange:
    """An item of a recording that differs. how: in words. is_rounding: its last bits depend on timing."""

    stage: str
    name: str
    how: str
    is_rounding: bool = False


def tensor_changes(old: "Recording", new: "Recording") -> Iterator[TensorChange]:
    """What differs between two recordings of a step, in the order of the step."""
    from lockstep.trainer.replay.recording import items

    before = {(item.stage, item.name): item for item in items(old)}
    after = {(item.stage, item.name): item for item in items(new)}
    order = list(before) if len(before) >= len(after) else list(after)
    for key in [*order, *(key for key in {**before, **after} if key not in order)]:
        first, second = before.get(key), after.get(key)
        if first is None or second is None:
            yield TensorChange(*key, f"only in the {'second' if first is None else 'first'}")
            continue
        how = _how(first, second)
        if how is not None:
            is_rounding = first.name == "rollout_log_probs" and old.rollout_rounds and _rounds(first, second)
            yield TensorChange(*key, how, is_rounding)


def _how(old: "Item", new: "Item") -> str | None:
    """How two values differ, in words; None if all bits are equal."""
    import torch

    a, b = old.value, new.value
    if isinstance(a, dict) and isinstance(b, dict):
        return _digests_differ(a, b)
    if isinstance(a, list) and isinstance(b, list):
        if a == b:
            return None
        return f"{sum(a):.9g} and {sum(b):.9g}" + (
            f" in {len(a)} and {len(b)} micro-batches" if len(a) != len(b) else ""
        )
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if a.numel() == 0 or torch.equal(_bits(a), _bits(b)):
        return None
    return _entries_differ(a, b)


def _bits(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _entries_differ(a: "Tensor", b: "Tensor") -> str:
    different = (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b
    if not different.any():
        return "signs of zeros, or bits of NaN"
    places = different.nonzero()
    rows = sorted(set(places[:, 0].tolist()))
    where = f"{len(places)} of {a.numel()} entries"
    if a.dim() > 1:
        row, position = places[0, 0].item(), places[0, 1].item()
        where += f", in {len(rows)} of {len(a)} rows; the first in row {row} at position {position}"
    else:
        where += f"; the first at {places[0, 0].item()}"
    first, second = a[tuple(places[0])].item(), b[tuple(places[0])].item()
    if not a.is_floating_point():
        return f"{where}: {first} and {second}"
    values = f"{first:.9g} and {second:.9g}"
    return f"{where}: {values}; largest difference {(a - b).abs().nan_to_num(math.inf)[different].max().item():.3g}"


def _digests_differ(a: "dict[str, Digest]", b: "dict[str, Digest]") -> str | None:
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if not names:
        return None
    both = [name for name in names if name in a and name in b]
    if not both:
        return f"{len(names)} tensors that only one has, the first {names[0]}"
    first, most = both[0], max(both, key=lambda name: abs(a[name].norm - b[name].norm))
    return (
        f"{len(names)} of {len({**a, **b})} tensors; the first {first}: norm {a[first].norm:.9g} and {b[first].norm:.9g}; "
        f"the largest change of a norm {abs(a[most].norm - b[most].norm):.3g}, of {most}"
    )


def _rounds(old: "Item", new: "Item") -> bool:
    import torch

    a, b = old.value, new.value
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.shape == b.shape
        and bool(torch.allclose(a, b, rtol=MOST_RELATIVE, atol=MOST_ABSOLUTE, equal_nan=True))
    )


@dataclass(frozen=True)
class RowChange:
    """A row of the batch in two recordings: (old, new) of each number, and where the tokens part (None: they are the same)."""

    row: int
    score: tuple[float, float]
    advantage: tuple[float, float]
    log_prob: tuple[float, float]
    parts_at: int | None
    texts: tuple[str, str]


def row_changes(old: "Recording", new: "Recording") -> list[RowChange] | None:
    """The rows that differ; None if the batches have different rows, or the step has no responses."""
    if not old.texts or len(old.texts) != len(new.texts):
        return None
    changes = []
    numbers = [{name: _per_row(recording, name) for name in ROW_NUMBERS} for recording in (old, new)]
    for row, texts in enumerate(zip(old.texts, new.texts)):
        pairs = {name: (numbers[0][name][row], numbers[1][name][row]) for name in ROW_NUMBERS}
        parts_at = _parts_at(old, new, row)
        if parts_at is not None or any(not _same(*pair) for pair in pairs.values()):
            changes.append(RowChange(row, pairs["score"], pairs["advantage"], pairs["log_prob"], parts_at, texts))
    return changes


ROW_NUMBERS = {
    "score": ("token_level_scores",),
    "advantage": ("advantages",),
    "log_prob": ("old_log_probs", "rollout_log_probs"),
}
"""Number of a row -> the columns it may be of, first choice first. Scores and log-probs are summed, advantages are means."""


def _per_row(recording: "Recording", number: str) -> list[float]:
    column = next((recording.columns[name] for name in ROW_NUMBERS[number] if name in recording.columns), None)
    mask = recording.columns.get("response_mask")
    if column is None or mask is None:
        return [math.nan] * len(recording.texts)
    masked = column.double() * (1 if number == "score" else mask.double())
    total = masked.sum(-1) if number != "advantage" else masked.sum(-1) / mask.double().sum(-1).clamp_min(1)
    values: list[float] = total.tolist()
    return values


def _parts_at(old: "Recording", new: "Recording", row: int) -> int | None:
    """The first position at which a row's response has other tokens. Padding, after the last trained token, is left out."""
    a, b = (_tokens(recording, row) for recording in (old, new))
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None if len(a) == len(b) else min(len(a), len(b)))


def _tokens(recording: "Recording", row: int) -> list[int]:
    trained = recording.columns["response_mask"][row].nonzero()
    tokens: list[int] = recording.columns["responses"][row, : int(trained.max()) + 1 if len(trained) else 0].tolist()
    return tokens
