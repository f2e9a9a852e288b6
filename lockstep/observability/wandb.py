"""Tracker `wandb` (Weights & Biases); the only file that imports it. $WANDB_MODE and its other variables apply."""

from collections.abc import Sequence
from typing import Any

from lockstep.observability.base import Metrics, RunIdFile, RunInfo, import_service, plain


class WandbTracker:
    """A resumed run continues the same W&B run; its id is in `wandb_run_id.txt` in the run's folder."""

    def __init__(self, run: RunInfo) -> None:
        self._wandb = import_service("wandb", "wandb")
        run_id = RunIdFile(run, "wandb")
        previous = run_id.previous()
        self._run = self._wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            config=run.config,
            dir=str(run.run_dir),
            id=previous,
            resume="allow" if previous else None,
        )
        run_id.save(str(self._run.id))

    def log(self, data: Metrics, step: int) -> None:
        self._run.log({name: plain(value) for name, value in data.items()}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[plain(row) for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self) -> None:
        self._run.finish()
