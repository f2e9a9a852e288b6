"""What every tracker is told about the run, and what it must do."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lockstep.utils.files import atomic_write_text, ensure_writable

Metrics = Mapping[str, Any]
"""Metric name -> number; a number may be a Python, numpy or zero-dimensional torch one. Text is allowed."""


@dataclass(frozen=True)
class RunInfo:
    """The run as trackers see it.

    run_dir:     the run's folder, `trainer.default_local_dir`.
    config:      the whole config as plain dicts, shown by trackers that show configs.
    total_steps: steps the run will take, None where unknown.
    start_step:  the step the run goes on from, 0 for a new run; what was tracked after it is void. None: void nothing.
    """

    project_name: str
    experiment_name: str
    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    start_step: int | None = None


class Tracker(Protocol):
    """One place where metrics go. Built as `factory(run: RunInfo)`; see `TRACKERS`."""

    def log(self, data: Metrics, step: int) -> None: ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...

    def finish(self) -> None: ...


def import_service(module: str, extra: str) -> Any:
    """The package of a tracker that is installed by `extra`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'trainer.logger names {extra}, which is not installed: pip install "lockstep-rl[{extra}]", or take it '
            "out of trainer.logger"
        ) from error


class RunIdFile:
    """The id that a service gave the run, kept as `<service>_run_id.txt` in the run's folder for a later process."""

    def __init__(self, run: RunInfo, service: str) -> None:
        self._path = ensure_writable(run.run_dir, "trainer.default_local_dir") / f"{service}_run_id.txt"
        self._resumed = bool(run.start_step)

    def earlier(self) -> str | None:
        """The id of the run that this one goes on from."""
        return self._path.read_text().strip() if self._resumed and self._path.exists() else None

    def keep(self, run_id: str) -> None:
        atomic_write_text(self._path, run_id)


def plain(value: Any) -> Any:
    """`value` with numpy and torch numbers and arrays, at any depth, as Python's own; anything unknown as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return plain(value.tolist())
    return str(value)
