"""What `lockstep replay` prints."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.observability.compare import PIPE_WIDTH
from lockstep.observability.step_line import one_line
from lockstep.trainer.replay.compare import DumpDifference, MetricChange, RowChange, TensorChange
from lockstep.utils.untrusted import printable

SHOWN_METRICS = 20
SHOWN_ROWS = 10
TEXT_CHARS = 40


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH, soft_wrap=True)


def say(line: str) -> None:
    console().print(Text(printable(line)))


def show_metrics(changes: Sequence[MetricChange], names: tuple[str, str], *, most: int | None = SHOWN_METRICS) -> None:
    """The metrics that are not equal. names: of the two versions."""
    different = [change for change in changes if change.verdict != "equal"]
    if not different:
        return
    table = _table("metric", *names, "difference", "relative", "")
    for change in different[:most]:
        difference = "" if change.difference is None else f"{change.difference:+.3g}"
        relative = "" if change.difference is None else f"{change.relative:.2g}"
        note = "rounding" if change.verdict == "rounding" else ""
        _add(table, change.name, _number(change.old), _number(change.new), difference, relative, note)
    console().print(table)
    if most is not None and len(different) > most:
        say(f" and {len(different) - most} more (--all shows them)")


def metrics_line(changes: Sequence[MetricChange]) -> str:
    counts = {verdict: sum(c.verdict == verdict for c in changes) for verdict in ("equal", "rounding", "differs")}
    parts = [f"{counts['equal']} of {len(changes)} metrics equal bit for bit"]
    if counts["rounding"]:
        parts.append(f"{counts['rounding']} equal up to rounding")
    if counts["differs"]:
        parts.append(f"{counts['differs']} differ")
    return ", ".join(parts)


def show_dumps(differences: Sequence[DumpDifference]) -> None:
    for difference in differences:
        rows = ", ".join(map(str, difference.rows[:SHOWN_ROWS])) + (", …" if len(difference.rows) > SHOWN_ROWS else "")
        say(f"{difference.file.name}: {len(difference.rows)} rows differ ({rows}), in {', '.join(difference.columns)}")


def show_rows(changes: Sequence[RowChange] | None, *, most: int | None = SHOWN_ROWS) -> None:
    if not changes:
        if changes is not None:
            say("rows: all equal (score, tokens, advantage, log-prob)")
        return
    table = _table("row", "score", "advantage", "log-prob", "tokens", "response")
    for change in changes[:most]:
        tokens = "same" if change.parts_at is None else f"part at {change.parts_at}"
        texts = [one_line(text, TEXT_CHARS) for text in change.texts]
        text = texts[0] if change.texts[0] == change.texts[1] else f"{texts[0]!r} -> {texts[1]!r}"
        numbers = [_pair(pair) for pair in (change.score, change.advantage, change.log_prob)]
        _add(table, str(change.row), *numbers, tokens, text)
    console().print(table)
    if most is not None and len(changes) > most:
        say(f" and {len(changes) - most} more rows (--all shows them)")


def show_tensors(changes: Sequence[TensorChange]) -> None:
    """Where two versions of a step part."""
    for change in changes:
        if change.is_rounding:
            say(f"{change.stage}: {change.name} differs by rounding, which depends on timing ({change.how})")
    real = [change for change in changes if not change.is_rounding]
    if not real:
        say("tensors: all equal bit for bit (batch, losses, gradients, weights)")
        return
    first = real[0]
    say(f"first difference: {first.stage}: {first.name}: {first.how}")
    stages = dict.fromkeys(change.stage for change in real)
    say(f"stages that differ: {' -> '.join(stages)}")
    for change in real[1:SHOWN_ROWS]:
        say(f"  {change.stage}: {change.name}: {change.how}")
    if len(real) > SHOWN_ROWS:
        say(f"  and {len(real) - SHOWN_ROWS} more")


def show_settings(rows: Sequence[tuple[str, list[str]]], names: tuple[str, str]) -> None:
    if not rows:
        say("no setting differs")
        return
    table = _table("setting", *names)
    for key, values in rows:
        _add(table, key, *values)
    console().print(table)


def show_findings(findings: Mapping[str, str]) -> None:
    for name, message in findings.items():
        say(f"audit {name}: {message}")


def _table(*columns: str) -> Table:
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(printable(cell)) for cell in cells))


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def _pair(pair: tuple[float, float]) -> str:
    old, new = (f"{value:.6g}" for value in pair)
    return old if pair[0] == pair[1] or (pair[0] != pair[0] and pair[1] != pair[1]) else f"{old} -> {new}"
