"""The registry of trackers, and `Tracking`, which logs to the selected ones."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.observability.console import ConsoleTracker
from lockstep.observability.jsonl import METRICS_FILE, FileTracker, JsonlFile, last_step, missing_steps
from lockstep.observability.mlflow import MlflowTracker
from lockstep.observability.swanlab import SwanlabTracker
from lockstep.observability.tensorboard import TensorboardTracker
from lockstep.observability.tracker import Metrics, RunInfo, Tracker
from lockstep.observability.wandb import WandbTracker
from lockstep.registry import Registry

logger = logging.getLogger(__name__)

TrackerFactory = Callable[[RunInfo], Tracker]

TRACKERS: Registry[TrackerFactory] = Registry("tracker", key="trainer.logger")
TRACKERS.register("console")(ConsoleTracker)
TRACKERS.register("file")(FileTracker)
TRACKERS.register("tensorboard")(TensorboardTracker)
TRACKERS.register("wandb")(WandbTracker)
TRACKERS.register("mlflow")(MlflowTracker)
TRACKERS.register("swanlab")(SwanlabTracker)


def _in_words(steps: Sequence[int]) -> str:
    """Step numbers with runs shortened: `steps 3, 5 to 9`."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    runs = [str(start) if start == end else f"{start} to {end}" for start, end in zip(starts, ends)]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(runs)}"


class Tracking:
    """All trackers of a run, plus `metrics.jsonl` in its folder, which is always written.

    default_backend: names in `TRACKERS`, or `pkg.module:attr` of a factory that takes a RunInfo.
    start_step:      the step the run resumes from, 0 for a new run; later records of an earlier process are dropped.
                     None drops nothing.
    last_step:       the last step that an earlier process had logged, of those that are kept.

    Use it as a context manager, or call `finish` at the end.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: list[str],
        config: dict[str, Any] | None = None,
        run_dir: Path | str = ".",
        total_steps: int | None = None,
        start_step: int | None = None,
    ) -> None:
        folder = Path(run_dir).expanduser()
        run = RunInfo(project_name, experiment_name, folder, config or {}, total_steps, start_step)
        factories = {name: TRACKERS.get(name) for name in default_backend}
        with ExitStack() as closing:
            self._metrics = JsonlFile(folder / METRICS_FILE, "trainer.default_local_dir", start_step)
            closing.callback(self._metrics.close)
            self.last_step = last_step(folder / METRICS_FILE)
            if start_step and (missing := missing_steps(folder / METRICS_FILE, before=start_step)):
                logger.warning("%s has no line for %s", folder / METRICS_FILE, _in_words(missing))
            self._trackers: dict[str, Tracker] = {}
            for name, factory in factories.items():
                self._trackers[name] = factory(run)
                closing.callback(self._trackers[name].finish)
            self._closing = closing.pop_all()

    def log(self, data: Metrics, step: int) -> None:
        self._metrics.append(data, step)
        for tracker in self._trackers.values():
            tracker.log(data, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a small table, such as validation samples, to the trackers only."""
        for tracker in self._trackers.values():
            tracker.log_table(name, columns, rows, step)

    def sync(self) -> None:
        """Flush `metrics.jsonl` to disk, so that a checkpoint never outlives the metrics before it."""
        self._metrics.sync()

    def finish(self) -> None:
        """Finish all trackers, even if one fails; a second call is a no-op."""
        self._closing.close()

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
