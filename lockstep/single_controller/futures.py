"""What a non-blocking call returns, which like DataProtoFuture has `get()`, and the error of a worker that is gone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class WorkerDiedError(RuntimeError):
    """The process of a worker has ended."""


ON_WORKER = "on the worker:\n"
"""Begins the note with the worker's traceback, on an exception that comes from another process."""


def worker_report(error: BaseException) -> str | None:
    """Where an exception of a worker in another process was raised, and its traceback there; None for any other exception."""
    notes: list[str] = getattr(error, "__notes__", [])
    tracebacks = [note.removeprefix(ON_WORKER) for note in notes if note.startswith(ON_WORKER)]
    return "\n".join([n for n in notes if not n.startswith(ON_WORKER)] + tracebacks) if tracebacks else None


class Future(ABC):
    """The output of one call on one worker, perhaps not there yet. Each backend has its own kind."""

    @abstractmethod
    def get(self) -> Any:
        """Wait; return the output or raise what the worker raised."""

    @classmethod
    def get_all(cls, futures: Sequence["Future"]) -> list[Any]:
        """Wait for several futures of this kind. A backend that can wait for all at once overrides it."""
        return [future.get() for future in futures]


class FutureList(list[Future]):
    """One future per worker, in rank order."""

    def get(self) -> list[Any]:
        """Wait for all; their outputs in rank order."""
        return type(self[0]).get_all(self) if self else []
