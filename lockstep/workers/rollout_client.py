"""Single requests to the rollout's workers, from an event loop of the controller.

generate ─► a worker's queue ─► advance_generation, one call after another ─► the caller's future
pause    ─► end_generation: unfinished requests stay here with their tokens, while the workers train
resume   ─► begin_generation: they go on, with the weights that the workers have then
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from lockstep.protocol.generation import Completion, GenerationRequest, Outcome, WeightsLostError
from lockstep.single_controller import FutureList, WorkerDiedError, WorkerGroup
from lockstep.utils import progress

Ended = list[tuple[int, Outcome]]

REPAIRABLE = (WorkerDiedError, WeightsLostError)
"""Failures of a request after which the rollout can be repaired (`trainer/ppo/rollout_repair.py`)."""


@dataclass(eq=False)
class _Pending:
    """A request that is not finished. done: what it has from before a pause."""

    request: GenerationRequest
    key: str
    part: "_Part"
    future: asyncio.Future[Completion]
    done: Completion | None = None

    @property
    def rest(self) -> GenerationRequest:
        return self.request if self.done is None else self.request.after(self.done.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass(eq=False)
class _Part:
    """A worker, or the workers of a tensor-parallel group.

    new, aborted:  to be sent with the next call.
    sent:          ids of the requests that the worker has.
    thread:        makes all calls on it: in one process they run the engine.
    """

    ranks: list[int]
    new: dict[int, GenerationRequest] = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)
    num_tokens: int = 0
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollout"))


class RolloutClient:
    """
    rollout_wg: worker group of `ActorRolloutRefWorker`, which trains only while the client is paused or not running.
    submission: held while calls are submitted, so that all ranks of a process get them in the same order. Other roles of the
                same processes are called with it meanwhile; local workers run when they are called, one at a time.
    failure:    of the workers, which ends all requests; None while they serve.
    """

    def __init__(self, rollout_wg: WorkerGroup) -> None:
        self._group: Any = rollout_wg
        self.submission = threading.Lock()
        mesh = rollout_wg.mesh("rollout")
        self._parts = [
            _Part([rank for rank, dp_rank in enumerate(mesh.dp_ranks) if dp_rank == part])
            for part in range(mesh.dp_size)
        ]
        self._pending: dict[int, _Pending] = {}
        self._part_of_key: dict[str, _Part] = {}
        self._num_with_key: Counter[str] = Counter()
        self._ids = count()
        self._pumps: list[asyncio.Task[None]] = []
        self._stopping = False
        self.failure: BaseException | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Requests are served inside; those still unfinished at the end are cancelled."""
        await self.resume()
        try:
            yield self
        finally:
            for pending in self._pending.values():
                pending.future.cancel()
            self._pending.clear()
            await self.pause()

    async def generate(self, request: GenerationRequest, *, key: str = "") -> Completion:
        """The response to one request, or its error; a pause delays it. Cancelling this call aborts the request.

        key: requests with the same key go to the same worker, for their common prefix.
        """
        if self.failure is not None:
            raise self.failure
        request_id = next(self._ids)
        pending = _Pending(request, key, self._choose_part(key), asyncio.get_running_loop().create_future())
        self._pending[request_id] = pending
        self._queue(request_id, pending)
        pending.part.num_tokens += pending.num_tokens
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._abort(request_id, pending)
            raise
        finally:
            self._release(request_id, pending)

    async def pause(self) -> None:
        """Give the workers back to training; unfinished requests keep the tokens they have."""
        if not self._pumps:
            return
        await self._stop_pumps()
        if self.failure is not None:
            return
        for part, ended in zip(self._parts, await self._end_generation()):
            for request_id, outcome in ended:
                if isinstance(outcome, Exception) or outcome.stop_reason != "abort":  # it was finished by then
                    self._finish(request_id, outcome)
                elif (pending := self._pending.get(request_id)) is not None:
                    pending.done = outcome if pending.done is None else pending.done.then(outcome)
            part.new.clear()
            part.aborted.clear()
            part.sent.clear()

    async def resume(self) -> None:
        """Serve the unfinished requests and those that come."""
        if self._pumps:
            raise RuntimeError("the rollout client is already running")
        if self.failure is not None:
            raise self.failure
        await self._in_thread(self._parts[0], self._group.begin_generation)
        self._start_pumps()

    async def restart(self) -> None:
        """Serve again after a failure, which ended all requests; raises if the workers cannot."""
        await self._stop_pumps()
        await self._in_thread(self._parts[0], self._group.restart_generation)
        self.forget_failure()
        self._start_pumps()

    def forget_failure(self) -> None:
        """The workers are new: serve again at the next `resume`. Requests that were unfinished have failed."""
        self.failure = None
        for part in self._parts:
            part.new.clear()
            part.aborted.clear()
            part.sent.clear()

    async def _stop_pumps(self) -> None:
        self._stopping = True
        for part in self._parts:
            part.has_work.set()
        await asyncio.gather(*self._pumps)
        self._pumps = []

    def _start_pumps(self) -> None:
        self._stopping = False
        for part in self._parts:
            part.has_work = asyncio.Event()  # of this event loop
        for request_id, pending in self._pending.items():
            if not pending.future.done():
                self._queue(request_id, pending)
        self._pumps = [asyncio.create_task(self._pump(part)) for part in self._parts]

    def _choose_part(self, key: str) -> _Part:
        part = self._part_of_key.get(key) or min(self._parts, key=lambda part: part.num_tokens)
        if key:
            self._part_of_key[key] = part
            self._num_with_key[key] += 1
        return part

    def _release(self, request_id: int, pending: _Pending) -> None:
        self._pending.pop(request_id, None)
        pending.part.num_tokens -= pending.num_tokens
        self._num_with_key[pending.key] -= 1
        if self._num_with_key[pending.key] <= 0:
            del self._num_with_key[pending.key]
            self._part_of_key.pop(pending.key, None)

    def _queue(self, request_id: int, pending: _Pending) -> None:
        pending.part.new[request_id] = pending.rest
        pending.part.has_work.set()

    def _abort(self, request_id: int, pending: _Pending) -> None:
        part = pending.part
        if part.new.pop(request_id, None) is None and request_id in part.sent:
            part.aborted.append(request_id)
            part.has_work.set()

    async def _pump(self, part: _Part) -> None:
        """One call after another while the part has requests; a failure goes to all callers."""
        try:
            while True:
                await part.has_work.wait()
                if self._stopping:
                    return
                new, part.new = part.new, {}
                aborted, part.aborted = part.aborted, []
                part.sent |= new.keys()
                ended: Ended = await self._in_thread(part, self._advance, part, list(new.items()), aborted)
                for request_id, outcome in ended:
                    part.sent.discard(request_id)
                    self._finish(request_id, outcome)
                if not part.new and not part.aborted and not part.sent and not self._stopping:
                    part.has_work.clear()
        except Exception as error:  # noqa: BLE001 - handed to the callers
            self.failure = error
            for pending in self._pending.values():
                if not pending.future.done():
                    pending.future.set_exception(error)

    def _finish(self, request_id: int, outcome: Outcome) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending.future.done():
            return
        progress.moved()
        if isinstance(outcome, Exception):
            pending.future.set_exception(outcome)
        else:
            pending.future.set_result(outcome if pending.done is None else pending.done.then(outcome))

    def _advance(self, part: _Part, new: list[tuple[int, GenerationRequest]], aborted: list[int]) -> Ended:
        with self.submission:
            calls = FutureList(self._group.call_rank(rank, "advance_generation", new, aborted) for rank in part.ranks)
        ended: Ended = calls.get()[0]
        return ended

    async def _end_generation(self) -> list[Ended]:
        """By part."""
        outputs = await self._in_thread(self._parts[0], self._group.end_generation)
        return [outputs[part.ranks[0]] for part in self._parts]

    async def _in_thread(self, part: _Part, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(part.thread, call, *args)
