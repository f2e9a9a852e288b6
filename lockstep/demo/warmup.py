"""The demo's supervised warm-up on partly wrong examples: its rows, its command for the SFT trainer, its progress bar.

problems ─► rows with correct or careless answers ─► `lockstep sft` ─► the model that RL starts from
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lockstep.demo.task import Problem, answer_text
from lockstep.observability.tracker import Metrics, RunInfo

LINE_EVERY = 150
"""Steps per line if the output is not a terminal."""
COPIES = 3
"""Rows of each problem: all but one of them forget the carries."""


@dataclass(frozen=True)
class WarmUp:
    """Warm-up settings."""

    steps: int = 900
    batch_size: int = 128
    lr: float = 3e-3


def write_examples(path: Path, problems: list[Problem], recipe: WarmUp, seed: int) -> int:
    """Write the rows, at most as many as the steps need, and return their number."""
    answers = [(p, p.right_answer if copy == 0 else p.careless_answer) for p in problems for copy in range(COPIES)]
    random.Random(seed).shuffle(answers)
    rows = [{"prompt": p.question, "response": answer_text(n)} for p, n in answers[: recipe.steps * recipe.batch_size]]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return len(rows)


def warm_up_settings(
    model: Path, rows: Path, num_rows: int, run_dir: Path, recipe: WarmUp, seed: int, device: str
) -> dict[str, object]:
    """The settings of the SFT command."""
    return {
        "data.train_files": rows,
        "data.prompt_key": "prompt",
        "data.response_key": "response",
        "data.train_batch_size": recipe.batch_size,
        "data.max_length": 16,
        "data.use_dynamic_bsz": "false",
        "model.path": model,
        "model.enable_gradient_checkpointing": "false",
        "model.use_remove_padding": "false",
        "model.fsdp_config.dtype": "fp32",
        "optim.lr": recipe.lr,
        "optim.lr_warmup_steps": min(20, recipe.steps // 2),
        "optim.min_lr_ratio": 0.05,
        "optim.betas": "[0.9,0.999]",
        "trainer.total_training_steps": recipe.steps,
        "trainer.total_epochs": -(-recipe.steps // (num_rows // recipe.batch_size)),
        "trainer.project_name": "demo",
        "trainer.experiment_name": "warmup",
        "trainer.logger": "lockstep.demo.warmup:WarmUpProgress",
        "trainer.seed": seed,
        "trainer.device": device,
        "trainer.default_local_dir": run_dir,
    }


class WarmUpProgress:
    """Tracker: a progress bar, or a line now and then if the output is not a terminal."""

    def __init__(self, run: RunInfo) -> None:
        self._console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
        self._total = run.total_steps or 0
        self._progress = Progress(
            TextColumn("warm-up"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=self._total, completed=run.start_step or 0, loss="")
        self._progress.start()

    def log(self, data: Metrics, step: int) -> None:
        loss = f"loss {data['train/loss']:.3f}"
        self._progress.update(self._task, completed=step, loss=loss)
        if not self._console.is_terminal and (step % LINE_EVERY == 0 or step == self._total):
            self._console.print(f"warm-up {step}/{self._total} | {loss}")

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """No-op: the warm-up logs no tables."""

    def finish(self) -> None:
        self._progress.stop()
