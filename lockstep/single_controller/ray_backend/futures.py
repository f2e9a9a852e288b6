"""Outputs of Ray workers, and how a worker's failure reaches the caller.

An exception keeps its type where it can be pickled; notes say which worker raised it and give the worker's traceback.
A worker whose process has ended gives WorkerDiedError.
"""

import pickle
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.single_controller.futures import ON_WORKER, Future, WorkerDiedError, worker_report
from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.single_controller.ray_backend.wire import unpack

DEATH_NOTICE_S = 1.0
"""After one rank failed: how long to look for a dead rank that is the reason (its peers lose their connections first)."""

LOST_NODE_S = 45.0
"""The same where a rank lost its connection to another: of a machine that is gone Ray learns by missed heartbeats."""

LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|error)|peer closed",
    re.I,
)
"""What collectives say when the process at the other end is gone."""

LOOK_S = 3.0
"""While a call takes longer than this, processes that no call waits for are looked after as well."""

LOSSES = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.WorkerCrashedError,
)
"""Ray's errors where a process or a machine is gone."""

DIED = "the worker's process died"


class WorkerError(RuntimeError):
    """Stands for an exception that cannot be pickled; the message begins with its type."""


def portable(error: Exception, note: str) -> Exception:
    """The exception in a form that survives the way to the controller. Called on the worker, where its traceback is."""
    told = worker_report(error) is not None  # by the worker where it came from: this one only waited for its output
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the exception's own code, which may raise anything
        error = WorkerError(f"{type(error).__qualname__}: {error}")
    error.add_note(note)
    if not told:
        error.add_note(ON_WORKER + text.rstrip())
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
        (value,) = self.get_all([self])
        return value

    def value(self) -> Any:
        """As `get`, where it is known to be there."""
        try:
            return unpack(ray.get(self.ref), self.writable)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LOSSES):  # of another worker, whose output was this one's argument
                raise WorkerDiedError(f"{DIED} whose output {self.site} waited for. {_reason(error.cause)}") from None
            raise error.cause from None
        except LOSSES as error:
            raise WorkerDiedError(f"{DIED}: {self.site}. {_reason(error)}") from None

    @classmethod
    def get_all(cls, futures: Sequence[Future]) -> list[Any]:
        """Outputs in the order of the futures. The first failure in time is raised: other ranks may wait for the failed one."""
        given = [future for future in futures if isinstance(future, RayFuture)]
        pending = {future.ref: i for i, future in enumerate(given)}
        values: list[Any] = [None] * len(given)
        while pending:
            if not ray.wait(list(pending), num_returns=1, timeout=LOOK_S)[0]:
                raise_deaths()
                continue
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            index = min(pending[ref] for ref in ready)
            del pending[given[index].ref]
            try:
                values[index] = given[index].value()
            except WorkerDiedError:
                raise
            except Exception as error:
                _raise_death_among([given[i] for i in pending.values()], error)
                raise
        return values


class Pulse:
    """Whether one actor lives. A question that it has not answered yet, as it is busy, stays open: death answers it too."""

    def __init__(self, handle: Any, site: Callable[[], str]) -> None:
        self._handle = handle
        self._site = site
        self._question: RayFuture | None = None

    def check(self) -> bool:
        """Whether it has answered; WorkerDiedError where it is known to be dead."""
        if self._question is None:
            self._question = RayFuture(self._handle.place.remote(), self._site())
        if not ray.wait([self._question.ref], timeout=0)[0]:
            return False
        answer, self._question = self._question, None
        answer.value()
        return True


PULSES: set[Pulse] = set()
"""Of every worker process that this program has started and not ended."""


def raise_deaths() -> None:
    """WorkerDiedError where any worker process has died, whether a call waits for it or not."""
    for pulse in list(PULSES):
        pulse.check()


def _raise_death_among(futures: list[RayFuture], error: Exception) -> None:
    """Raise the death of a peer, if one has died, as the reason for `error`."""
    refs = {future.ref: future for future in futures}
    end = time.monotonic() + (LOST_NODE_S if LOST_CONNECTION.search(str(error)) else DEATH_NOTICE_S)
    try:
        raise_deaths()  # which takes the answers of before, so that those in `silent` are asked anew
        silent = set(PULSES)
        while (refs or silent) and time.monotonic() < end:
            for ref in ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else ():
                _raise_only_death(refs.pop(ref))
            silent = {pulse for pulse in silent if not pulse.check()}
            time.sleep(0.1)
    except WorkerDiedError as death:
        raise death from error


def _raise_only_death(future: RayFuture) -> None:
    try:
        future.value()
    except WorkerDiedError:
        raise
    except Exception:  # noqa: BLE001 - another rank's failure; the first one is raised
        return


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text[max(0, text.find("The actor is dead because")) :].split(" Some common causes include")[0]
    hint = " (Most often it is the system's out-of-memory killer: `dmesg` on its node tells.)"
    return f"Ray says: {text}{hint if 'Worker unexpectedly exits' in text else ''}"
