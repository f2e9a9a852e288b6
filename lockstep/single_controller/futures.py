"""Futures returned by non-blocking calls, and the error of a dead worker."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class WorkerDiedError(RuntimeError):
    """The process of a worker has died."""


ON_WORKER = "on the worker:\n"
"""Prefix of the note with the worker's traceback, on an exception from another process."""


def worker_report(error: BaseException) -> str | None:
    """Origin and traceback of an exception raised by a worker in another process; None for other exceptions."""
    notes: list[str] = getattr(error, "__notes__", [])
    tracebacks = [note.removeprefix(ON_WORKER) for note in notes if note.startswith(ON_WORKER)]
    return "\n".join([n for n in notes if not n.startswith(ON_WORKER)] + tracebacks) if tracebacks else None


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
