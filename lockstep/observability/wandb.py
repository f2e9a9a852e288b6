"""Tracker `wandb`: Weights & Biases, the one place that imports it. $WANDB_MODE and its other variables hold."""

import importlib
from collections.abc import Sequence
from typing import Any

from lockstep.observability.base import Metrics, RunInfo, plain
from lockstep.utils.files import atomic_write_text, ensure_writable


def import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ImportError(
            'trainer.logger names wandb, which is not installed: pip install "lockstep-rl[wandb]", or take it '
            "out of trainer.logger"
        ) from error


class WandbTracker:
    """A resumed run goes on in the same W&B run: its id is kept as `wandb_run_id.txt` in the run's folder."""

    def __init__(self, run: RunInfo) -> None:
        self._wandb = import_wandb()
        ensure_writable(run.run_dir, "trainer.default_local_dir")
        id_file = run.run_dir / "wandb_run_id.txt"
        earlier = id_file.read_text().strip() if run.start_step and id_file.exists() else None
        self._run = self._wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            config=run.config,
            dir=str(run.run_dir),
            id=earlier,
            resume="allow" if earlier else None,
        )
        atomic_write_text(id_file, str(self._run.id))

    def log(self, data: Metrics, step: int) -> None:
        self._run.log({name: plain(value) for name, value in data.items()}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[plain(row) for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self) -> None:
        self._run.finish()
