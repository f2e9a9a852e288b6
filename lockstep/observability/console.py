"""Tracker `console`: one line per step, and on a terminal a small live display below.

terminal:  step 12/100 | reward 0.41 | ...      <- scrolls, one line per step
           training ━━━━╺━━━━━ 12/100  0:03:10, 23 min 10 s left
           generate 312/1024 sequences, 12 s
           reward 0.41 ▁▂▃▅▇ | length 83 | ...

otherwise: only the lines, as plain text without escape codes; `ProgressLog` logs phases that take long
"""

import atexit
import logging
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lockstep.observability.step_line import (
    FIELDS,
    first_number,
    format_seconds,
    one_line,
    sparkline,
    step_parts,
    validation_parts,
)
from lockstep.observability.step_times import StepTimes
from lockstep.observability.tracker import Metrics, RunInfo
from lockstep.utils.progress import describe, show_live
from lockstep.utils.untrusted import printable

STEPS_DRAWN = 40
CELL_CHARS = 300


class LogHandler(logging.Handler):
    """Writes log records to the current stderr, which the live display replaces so that they appear above it.

    Records may hold what a model or a tool wrote, so they are made `printable`.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(printable(self.format(record)) + "\n")
            sys.stderr.flush()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - as the handlers of logging do
            self.handleError(record)


class ConsoleTracker:
    """console: where to write; by default stdout, with the live display if it is a terminal."""

    def __init__(self, run: RunInfo, console: Console | None = None) -> None:
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._total_steps = run.total_steps
        self._step_times = StepTimes()
        interactive = self._console.is_terminal and not self._console.is_dumb_terminal
        self._display = LiveDisplay(self._console, run) if interactive else None
        atexit.register(self.finish)  # an unstopped display leaves the terminal without a cursor

    def log(self, data: Metrics, step: int) -> None:
        parts = step_parts(data)
        validation = validation_parts(data)
        left = None
        if parts:
            left = self._step_times.seconds_left(data, step, self._total_steps)
            end = [f"{format_seconds(left)} left"] if left else []
            self._write(" | ".join([self._step_name(step), *parts, *end]))
        if validation:
            self._write(" | ".join([f"validation at {self._step_name(step)}", *validation]), style="bold")
        if self._display is not None:
            self._display.update(data, step, parts, validation, left)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Show the rows, with cells truncated to a readable length."""
        shown = [[one_line(value, CELL_CHARS) for value in row] for row in rows]
        title = f"{name} at {self._step_name(step)}, {len(rows)} rows"
        self._write(title)
        if self._display is None:
            for row in shown:
                self._write("  " + " | ".join(f"{column}: {cell}" for column, cell in zip(columns, row)))
            return
        table = Table(show_lines=True)
        for column in columns:
            table.add_column(Text(column))
        for row in shown:
            table.add_row(*map(Text, row))
        self._console.print(table)

    def finish(self) -> None:
        atexit.unregister(self.finish)
        if self._display is not None:
            self._display.stop()

    def _step_name(self, step: int) -> str:
        return f"step {step}" if self._total_steps is None else f"step {step}/{self._total_steps}"

    def _write(self, line: str, style: str = "") -> None:
        """Write one line without markup or wrapping; characters that the stream cannot encode are replaced."""
        text = Text(line.encode(self._console.encoding, "replace").decode(self._console.encoding), style=style)
        if self._console.is_terminal:
            self._console.print(text, soft_wrap=True)
            return
        try:
            print(text.plain, file=self._console.file, flush=True)
        except BrokenPipeError:
            self._console.on_broken_pipe()


class LiveDisplay:
    """The lines at the bottom of the terminal: progress, latest metrics, latest validation."""

    def __init__(self, console: Console, run: RunInfo) -> None:
        self._rewards: deque[float] = deque(maxlen=STEPS_DRAWN)
        self._numbers = Text(f"{run.project_name}/{run.experiment_name}: preparing the first step", style="dim")
        self._validation = Text()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        start = run.start_step or 0
        total = run.total_steps
        self._count = (lambda step: f"{step}") if total is None else (lambda step: f"{step}/{total}")
        self._task = self._progress.add_task("", total=total, completed=start, count=self._count(start), left="")
        self._live = Live(
            console=console,
            refresh_per_second=2,
            get_renderable=self._render,
            redirect_stderr=sys.stderr.isatty(),  # a log file keeps its lines
        )
        self._live.start(refresh=True)
        show_live(True)

    def update(self, data: Metrics, step: int, parts: list[str], validation: list[str], left: float | None) -> None:
        if parts:
            if (reward := first_number(data, FIELDS[0].keys)) is not None:
                self._rewards.append(reward)
                parts = [f"{parts[0]} {sparkline(list(self._rewards))}", *parts[1:]]
            self._numbers = Text(" | ".join(parts), overflow="ellipsis", no_wrap=True)
        if validation:
            line = " | ".join([f"validation at step {step}", *validation])
            self._validation = Text(line, style="bold", overflow="ellipsis", no_wrap=True)
        self._progress.update(
            self._task, completed=step, count=self._count(step), left=f"{format_seconds(left)} left" if left else ""
        )
        self._live.refresh()

    def stop(self) -> None:
        if self._live.is_started:
            show_live(False)
        self._live.stop()

    def _render(self) -> Group:
        phases, seconds = describe()
        doing = Text(f"{phases}, {format_seconds(seconds)}", style="cyan", overflow="ellipsis", no_wrap=True)
        return Group(self._progress, *([doing] if phases else []), *filter(None, (self._numbers, self._validation)))
