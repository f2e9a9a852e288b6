"""verl.utils.tracking"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.observability import trackers

_OPEN: "weakref.WeakSet[Tracking]" = weakref.WeakSet()


class Tracking(trackers.Tracking):
    """Logs to `default_backend`, and to metrics.jsonl in `trainer.default_local_dir` of the given config."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        run_dir = (config or {}).get("trainer", {}).get("default_local_dir", ".")
        super().__init__(project_name, experiment_name, names, dict(config or {}), run_dir)
        weakref.finalize(self, self._closing.close)  # programs on verl do not call `finish`
        _OPEN.add(self)

    def log(self, data: Mapping[str, Any], step: int, backend: Sequence[str] | None = None) -> None:
        """backend: the trackers to log to; None is all, and metrics.jsonl."""
        if backend is None:
            super().log(dict(data), step)
            return
        for name in backend:
            self._trackers[name].log(dict(data), step)


class ValidationGenerationsLogger:
    """Logs samples of a validation as a table, to the trackers of the program's `Tracking`."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self.project_name, self.experiment_name = project_name, experiment_name

    def log(self, loggers: str | Sequence[str], samples: Sequence[Sequence[Any]], step: int) -> None:
        """loggers: names of trackers. samples: (input, output, score) each."""
        names = [loggers] if isinstance(loggers, str) else list(loggers)
        if not _OPEN:
            raise RuntimeError("ValidationGenerationsLogger.log: construct a Tracking first, whose trackers it uses")
        for tracking in _OPEN:
            for name in names:
                if name in tracking._trackers:
                    columns = ["input", "output", "score"]
                    tracking._trackers[name].log_table("val/generations", columns, samples, step)


class OpenTrackings:
    """Every `Tracking` of the program, for the parts of Lockstep's trainer that log."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        for tracking in _OPEN:
            tracking.log_table(name, columns, rows, step)

    def sync(self) -> None:
        for tracking in _OPEN:
            tracking.sync()
