"""Tracker `wandb`: Weights & Biases, the one place that imports it. $WANDB_MODE and its other variables hold."""

from collections.abc import Sequence
from typing import Any

from lockstep.observability.base import Metrics, RunIdFile, RunInfo, import_service, plain


class WandbTracker:
    """A resumed run goes on in the same W&B run: its id is kept as `wandb_run_id.txt` in the run's folder."""

    def __init__(self, run: RunInfo) -> None:
        self._wandb = import_service("wandb", "wandb")
        run_id = RunIdFile(run, "wandb")
        earlier = run_id.earlier()
        self._run = self._wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            config=run.config,
            dir=str(run.run_dir),
            id=earlier,
            resume="allow" if earlier else None,
        )
        run_id.keep(str(self._run.id))

    def log(self, data: Metrics, step: int) -> None:
        self._run.log({name: plain(value) for name, value in data.items()}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[plain(row) for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self) -> None:
        self._run.finish()
