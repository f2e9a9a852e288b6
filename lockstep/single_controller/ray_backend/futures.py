"""Outputs of Ray workers, and how a worker's failure reaches the caller.

An exception keeps its type if it can be pickled; notes say which worker raised it and have the worker's traceback.
If a worker's process has died, WorkerDiedError is raised.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.single_controller.futures import Future, WorkerDiedError
from lockstep.single_controller.ray_backend.cluster import ray, session
from lockstep.single_controller.ray_backend.serialize import unpack
from lockstep.utils.progress import waiting

DEATH_NOTICE_S = 1.0
"""After a rank failed: how long to look for a dead rank as the cause (its peers lose their connections first)."""

LOST_NODE_S = 45.0
"""The same if a rank lost a connection: Ray detects a lost machine by missed heartbeats."""

LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|error)|peer closed",
    re.I,
)
"""Error messages of collectives when a peer process is gone."""

MAX_SITES = 2
"""Calls that are listed while they are waited for."""

LIVENESS_INTERVAL_S = 3.0
"""While a call takes longer than this, check that all worker processes are alive."""

DEATH_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.WorkerCrashedError,
)
"""Ray's errors for a lost process or machine."""

DIED = "the worker's process died"


@dataclass(frozen=True)
class RayFuture(Future):
    """The output of one call on one worker.

    ref:      Ray's object reference.
    site:     which call on which worker, for error messages.
    writable: False if the caller copies the output anyway, by joining it with others.
    """

    ref: Any
    site: str
    writable: bool = True

    def get(self) -> Any:
        (value,) = self.get_all([self])
        return value

    def value(self) -> Any:
        """Like `get`, for an output that is known to be ready."""
        try:
            return unpack(ray.get(self.ref), self.writable)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DEATH_ERRORS):  # of another worker, whose output was this one's argument
                raise WorkerDiedError(f"{DIED} whose output {self.site} waited for. {_reason(error.cause)}") from None
            raise error.cause from None
        except DEATH_ERRORS as error:
            raise WorkerDiedError(f"{DIED}: {self.site}. {_reason(error)}") from None

    @classmethod
    def get_all(cls, futures: Sequence[Future]) -> list[Any]:
        """Outputs in the order of the futures. Raises the earliest failure, since other ranks may hang because of it."""
        given = [future for future in futures if isinstance(future, RayFuture)]
        pending = {future.ref: i for i, future in enumerate(given)}
        began = time.monotonic()
        values: list[Any] = [None] * len(given)
        while pending:
            with waiting("worker", _listed([given[i].site for i in pending.values()]), began):
                is_ready = bool(ray.wait(list(pending), num_returns=1, timeout=LIVENESS_INTERVAL_S)[0])
            if not is_ready:
                raise_deaths()
                continue
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            finished = sorted(pending.pop(ref) for ref in ready)
            for position, index in enumerate(finished):
                try:
                    values[index] = given[index].value()
                except WorkerDiedError:
                    raise
                except Exception as error:
                    others = [*finished[position + 1 :], *pending.values()]
                    _raise_death_among([given[i] for i in others], error)
                    raise
        return values


class LivenessProbe:
    """Pings one actor. A busy actor answers late; the open ping fails as soon as the actor is dead.

    is_tolerated: its death does not concern calls on others.
    """

    def __init__(self, handle: Any, site: Callable[[], str]) -> None:
        self._handle = handle
        self._site = site
        self._ping: RayFuture | None = None
        self.session = session()
        self.is_tolerated = False

    def check(self) -> bool:
        """Whether the actor has answered; raises WorkerDiedError if it is known to be dead."""
        if self._ping is None:
            self._ping = RayFuture(self._handle.place.remote(), self._site())
        if not ray.wait([self._ping.ref], timeout=0)[0]:
            return False
        answer, self._ping = self._ping, None
        answer.value()
        return True


PROBES: set[LivenessProbe] = set()
"""One per worker process that this program has started and not stopped; those of an earlier Ray session are dropped."""


def raise_deaths() -> None:
    """Raise WorkerDiedError if any worker process has died, even if no call waits for it."""
    PROBES.difference_update([probe for probe in PROBES if probe.session != session()])
    for probe in list(PROBES):
        if not probe.is_tolerated:
            probe.check()


def _raise_death_among(futures: list[RayFuture], error: Exception) -> None:
    """Raise WorkerDiedError from `error` if a peer has died."""
    refs = {future.ref: future for future in futures}
    end = time.monotonic() + (LOST_NODE_S if LOST_CONNECTION.search(str(error)) else DEATH_NOTICE_S)
    try:
        raise_deaths()  # consumes earlier answers, so that the probes below ping again
        silent = set(PROBES)
        while (refs or silent) and time.monotonic() < end:
            for ref in ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else ():
                _raise_only_death(refs.pop(ref))
            silent = {probe for probe in silent if not probe.check()}
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


def _listed(sites: list[str]) -> str:
    more = len(sites) - MAX_SITES
    return "; ".join(sites[:MAX_SITES]) + (f"; and {more} more" if more > 0 else "")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text[max(0, text.find("The actor is dead because")) :].split(" Some common causes include")[0]
    hint = " (The most likely cause is the system's out-of-memory killer; check `dmesg` on the node.)"
    return f"Ray says: {text}{hint if 'Worker unexpectedly exits' in text else ''}"
