"""Tracker `tensorboard`: event files in $TENSORBOARD_DIR or `tensorboard/` in the run's folder."""

import os
from collections.abc import Sequence
from typing import Any

from lockstep.observability.tracker import Metrics, RunInfo, plain
from lockstep.utils.files import ensure_writable


class TensorboardTracker:
    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported here since it takes seconds

        chosen = os.environ.get("TENSORBOARD_DIR")
        key = "TENSORBOARD_DIR" if chosen else "trainer.default_local_dir"
        folder = ensure_writable(chosen or run.run_dir / "tensorboard", key)
        purge_step = run.start_step + 1 if run.start_step else run.start_step  # a new run also discards step 0
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, data: Metrics, step: int) -> None:
        for name, value in data.items():
            value = plain(value)
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, float(value), step)
            elif value is not None:
                self._writer.add_text(name, str(value), step)
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    """One cell of a Markdown table, with bars and line breaks escaped."""
    return str(plain(value)).replace("|", "\\|").replace("\n", "<br>")
