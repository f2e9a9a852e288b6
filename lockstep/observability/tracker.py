"""The tracker interface and the run information that trackers get."""

import importlib
import importlib.util
import netrc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lockstep.utils.files import atomic_write_text, ensure_writable

Metrics = Mapping[str, Any]
"""Metric name -> Python, numpy or zero-dimensional torch number, or text."""


@dataclass(frozen=True)
class RunInfo:
    """The run as trackers see it.

    run_dir:     the run's folder, `trainer.default_local_dir`.
    config:      the whole config as plain dicts, for trackers that show it.
    total_steps: number of steps of the run, None if unknown.
    start_step:  the step the run resumes from, 0 for a new run; later records are discarded. None discards nothing.
    """

    project_name: str
    experiment_name: str
    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    start_step: int | None = None


class Tracker(Protocol):
    """A destination of metrics, built by `factory(run: RunInfo)`; see `TRACKERS`.

    A factory may have a method `check()`, called before a model is loaded: ValueError if it could not start.
    """

    def log(self, data: Metrics, step: int) -> None: ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...

    def finish(self) -> None: ...


def import_service(module: str, extra: str) -> Any:
    """Import the package of a tracker, installed by `extra`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(_not_installed(extra)) from error


def check_installed(module: str, extra: str) -> None:
    """ValueError if the package of a tracker is not installed."""
    if sys.modules.get(module, module) is None or importlib.util.find_spec(module) is None:
        raise ValueError(_not_installed(extra))


def _not_installed(extra: str) -> str:
    return (
        f'trainer.logger includes {extra}, which is not installed: pip install "lockstep-rl[{extra}]", or remove '
        "it from trainer.logger"
    )


def has_netrc_login(path: Path, *hosts: str) -> bool:
    """Whether a netrc file has a password for one of the hosts."""
    try:
        file = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(login is not None and bool(login[2]) for login in map(file.authenticators, hosts))


class RunIdFile:
    """The service's id of the run, saved as `<service>_run_id.txt` in the run's folder so that a resumed run can use it.

    Without a start step, as in an evaluation, the service gets a separate run, whose id is not saved.
    """

    def __init__(self, run: RunInfo, service: str) -> None:
        self._path = ensure_writable(run.run_dir, "trainer.default_local_dir") / f"{service}_run_id.txt"
        self._start_step = run.start_step

    def previous(self) -> str | None:
        """The id of the run being resumed."""
        return self._path.read_text().strip() if self._start_step and self._path.exists() else None

    def save(self, run_id: str) -> None:
        if self._start_step is not None:
            atomic_write_text(self._path, run_id)


class ServiceTracker:
    """A service with W&B's interface. A resumed run goes on with the same run; its id is in `<service>_run_id.txt` in its folder.

    folder: the argument and value that say where the service writes.
    """

    def __init__(self, run: RunInfo, service: str, **folder: str) -> None:
        self._module = import_service(service, service)
        run_id = RunIdFile(run, service)
        previous = run_id.previous()
        self._run = self._module.init(
            project=run.project_name,
            name=run.experiment_name,
            config=run.config,
            id=previous,
            resume="allow" if previous else None,
            **folder,
        )
        run_id.save(str(self._run.id))

    def finish(self) -> None:
        self._run.finish()


def plain(value: Any) -> Any:
    """Convert numpy and torch values, at any depth, to Python values; unknown types to text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return plain(value.tolist())
    return str(value)


def numbers_of(data: Metrics) -> dict[str, float]:
    """The metrics that are numbers."""
    converted = {name: plain(value) for name, value in data.items()}
    return {name: float(value) for name, value in converted.items() if isinstance(value, (int, float))}
