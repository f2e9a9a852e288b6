"""Futures returned by non-blocking calls, and how exceptions of workers reach the caller."""

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class RestartError(RuntimeError):
    """The workers cannot go on, but a restart from the last checkpoint can (`trainer.max_restarts`).

    counts:  whether the restart is one of those that the config allows; if not, who raises it bounds their number.
    changes: config keys of the restarted run, by dotted name.
    """

    def __init__(self, cause: str, *, counts: bool = True, changes: Mapping[str, Any] | None = None) -> None:
        super().__init__(cause)
        self.counts = counts
        self.changes = dict(changes or {})


class WorkerDiedError(RestartError):
    """The process of a worker has died."""


class HangError(RestartError):
    """The run was stuck and was ended by its watchdog (`trainer.on_hang`). may_restart: restart it from the last checkpoint."""

    may_restart = False


ON_WORKER = "on the worker:\n"
"""Prefix of the note with the worker's traceback, on an exception from another process."""


def worker_report(error: BaseException) -> str | None:
    """Origin and traceback of an exception raised by a worker in another process; None for other exceptions."""
    notes: list[str] = getattr(error, "__notes__", [])
    tracebacks = [note.removeprefix(ON_WORKER) for note in notes if note.startswith(ON_WORKER)]
    return "\n".join([n for n in notes if not n.startswith(ON_WORKER)] + tracebacks) if tracebacks else None


class WorkerError(RuntimeError):
    """Replaces an exception that cannot be pickled; the message begins with its type."""


def picklable(error: Exception, note: str) -> Exception:
    """The exception in picklable form with notes. Called on the worker, which has the traceback."""
    is_forwarded = worker_report(error) is not None  # raised by another worker, whose output this one waited for
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs user code, which may raise anything
        error = WorkerError(f"{type(error).__qualname__}: {error}")
    error.add_note(note)
    if not is_forwarded:
        error.add_note(ON_WORKER + text.rstrip())
    return error


class Future(ABC):
    """The output of one call on one worker. Each backend has its own subclass."""

    @abstractmethod
    def get(self) -> Any:
        """Wait; return the output or raise the worker's exception."""

    @classmethod
    def get_all(cls, futures: Sequence["Future"]) -> list[Any]:
        """Wait for several futures of this class; overridden by backends that can wait for all at once."""
        return [future.get() for future in futures]


class FutureList(list[Future]):
    """One future per worker, in rank order."""

    def get(self) -> list[Any]:
        """Wait for all; return their outputs in rank order."""
        return type(self[0]).get_all(self) if self else []
