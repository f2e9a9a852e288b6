"""Outputs of Ray workers, and how a worker's failure reaches the caller.

An exception keeps its type where it can be pickled; notes say which worker raised it and give the worker's traceback.
A worker whose process has ended gives WorkerDiedError.
"""

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.single_controller.futures import Future, WorkerDiedError
from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.single_controller.ray_backend.wire import unpack

DEATH_NOTICE_S = 1.0
"""After one rank failed: how long to look for a dead rank that is the reason (its peers lose their connections first)."""

_TOLD = "_lockstep_traceback_told"


class WorkerError(RuntimeError):
    """Stands for an exception that cannot be pickled; the message begins with its type."""


def portable(error: Exception, note: str) -> Exception:
    """The exception in a form that survives the way to the controller. Called on the worker, where its traceback is."""
    told = getattr(error, _TOLD, False)  # by the worker where it came from: this one only waited for its output
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the exception's own code, which may raise anything
        error = WorkerError(f"{type(error).__qualname__}: {error}")
    error.add_note(note)
    if not told:
        error.add_note("on the worker:\n" + text.rstrip())
        setattr(error, _TOLD, True)
    return error


@dataclass(frozen=True)
class RayFuture(Future):
    """The output of one call on one worker.

    ref:      Ray's reference to it.
    site:     which call on which worker, in the words of an error message.
    writable: False where whoever asked for it joins the outputs and so copies them anyway.
    """

    ref: Any
    site: str
    writable: bool = True

    def get(self) -> Any:
        try:
            return unpack(ray.get(self.ref), self.writable)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            raise WorkerDiedError(f"the worker's process died: {self.site}. Ray says: {_reason(error)}") from None

    @classmethod
    def get_all(cls, futures: Sequence[Future]) -> list[Any]:
        """Outputs in the order of the futures. The first failure in time is raised: other ranks may wait for the failed one."""
        refs = [future.ref for future in futures if isinstance(future, RayFuture)]
        pending = {ref: i for i, ref in enumerate(refs)}
        values: list[Any] = [None] * len(futures)
        while pending:
            ray.wait(list(pending), num_returns=1)
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            index = min(pending[ref] for ref in ready)
            del pending[refs[index]]
            try:
                values[index] = futures[index].get()
            except WorkerDiedError:
                raise
            except Exception as error:
                _raise_death_among([futures[i] for i in pending.values()], error)
                raise
        return values


def _raise_death_among(futures: list[Future], error: Exception) -> None:
    """Raise the death of a peer, if one has died, as the reason for `error`."""
    refs = {future.ref: future for future in futures if isinstance(future, RayFuture)}
    if not refs:
        return
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=DEATH_NOTICE_S)
    for ref in ready:
        try:
            refs[ref].get()
        except WorkerDiedError as death:
            raise death from error
        except Exception:  # noqa: BLE001 - another rank's failure; the first one is raised
            continue


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[text.find("The actor is dead because") :] if "The actor is dead because" in text else text
