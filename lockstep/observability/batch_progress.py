"""Progress of a program that works through prompts in batches: a bar on a terminal, else a line in the log now and then.

generate ━━━━╺━━━━━ 384/1,319 prompts  12,300 tok/s  3 min 05 s left
generate 312/640 sequences, 12 s
"""

import logging
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from lockstep.observability.step_line import format_number, format_seconds
from lockstep.utils.progress import describe, show_live

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
"""Time between two lines of a log."""


class BatchProgress:
    """total: prompts; done: of those, finished before. Speed and time left are of this process only."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.total, self.done = total, done
        self._begin = done
        self._began = time.monotonic()
        self._tokens = 0
        self._logged = self._began
        console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn("generate"), BarColumn(bar_width=30), TextColumn("{task.description}"), console=console
            )
            self._task = self._bar.add_task(self._text(), total=total, completed=done)
            self._live = Live(console=console, refresh_per_second=2, get_renderable=self._render, redirect_stdout=False)

    def __enter__(self) -> "BatchProgress":
        if self._live is not None:
            self._live.start(refresh=True)
            show_live(True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            show_live(False)
            self._live.stop()

    def advance(self, prompts: int, tokens: int) -> None:
        """A batch is finished: its prompts, and the tokens of all responses to them."""
        self.done += prompts
        self._tokens += tokens
        now = time.monotonic()
        if self._live is not None:
            self._bar.update(self._task, completed=self.done, description=self._text())
        elif self.done == self.total or now - self._logged >= LINE_EVERY_S:
            self._logged = now
            logger.info("%s", self._text())

    def _text(self) -> str:
        parts = [f"{self.done:,}/{self.total:,} prompts"]
        seconds = time.monotonic() - self._began
        here = self.done - self._begin
        if here and seconds > 0:
            parts.append(f"{format_number(self._tokens / seconds)} tok/s")
        if here and self.done < self.total:
            parts.append(f"{format_seconds((self.total - self.done) * seconds / here)} left")
        return ", ".join(parts)

    def _render(self) -> Group:
        phases, seconds = describe()
        doing = Text(f"{phases}, {format_seconds(seconds)}", style="cyan", overflow="ellipsis", no_wrap=True)
        return Group(self._bar, *([doing] if phases else []))
