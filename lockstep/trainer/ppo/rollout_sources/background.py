"""Generates groups of samples in a thread with an event loop, while the main thread trains.

    main thread                                    rollout thread
    draw prompts ─► add ─────────────────────────► waiting ─► sampler.sample(prompt) … ─► finished, journalled
    take         ◄───────────────────────────────── enough groups are finished
    pause ─► send weights ─► resume                unfinished requests keep their tokens

The schedule belongs to the rollout thread: a method that the main thread calls runs a coroutine there and waits for it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.group_sampler import GroupSampler
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group, GroupId, GroupSchedule
from lockstep.trainer.ppo.rollout_sources.journal import Journal
from lockstep.utils import step_stop
from lockstep.utils.progress import waiting
from lockstep.workers.rollout_client import REPAIRABLE

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0
"""How long the thread may take to end: it does not if a worker never answers."""


class BackgroundRollout:
    """is_kept: whether samples are worth training on (`algorithm.filter_groups`)."""

    def __init__(
        self,
        sampler: GroupSampler,
        schedule: GroupSchedule,
        journal: Journal,
        is_kept: Callable[[DataProto], bool],
    ) -> None:
        self.sampler = sampler
        self.schedule = schedule
        self.journal = journal
        self.is_kept = is_kept
        self.num_dropped = {"stale": 0, "filtered": 0}
        """Groups that were dropped, by reason."""
        self._tasks: dict[GroupId, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._num_repairs = 0
        self._serving: AsyncExitStack | None = None
        self._is_paused = True
        self._busy_s = 0.0
        self._busy_since = 0.0  # 0 while nothing is generated
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def add(self, groups: list[Group]) -> None:
        """Groups to sample when there is room."""
        self._call(self._add(groups))

    def start(self, step: int) -> None:
        """Begin to sample as many groups as there is room for."""
        self._call(self._start(step))

    def take(self, step: int) -> list[Group] | None:
        """Start groups and wait for those that the step trains on; None if more prompts are needed."""
        # groups that were taken are no longer in the schedule, which a checkpoint saves
        return self._call(self._take(step), lambda groups: step_stop.keep() if groups is not None else None)

    def finish_all(self) -> None:
        """Wait for every group that was started."""
        self._call(self._finish_all())

    def resume(self) -> None:
        """Begin to generate, or go on with the requests that `pause` kept; no-op while generating."""
        self._call(self._resume())

    def pause(self) -> None:
        """Stop generating; unfinished requests keep their tokens. No-op while paused."""
        self._call(self._pause())

    def interrupt(self) -> bool:
        """After a failure: `pause` while the rollout is repaired. Returns False if it was paused already."""
        return self._call(self._interrupt())

    def recover(self, *, generate: bool) -> None:
        """The rollout is repaired: sample the groups again that the failure ended. generate: begin now, not at `resume`."""
        self._call(self._recover(generate))

    def groups(self) -> list[Group]:
        """All groups that no step has trained on."""
        return self._call(self._groups())

    def take_busy_s(self) -> float:
        """Seconds since the last call during which something was generated."""
        return self._call(self._take_busy_s())

    def close(self) -> None:
        """End the thread; unfinished requests are aborted."""
        if not self._thread.is_alive():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - the run ends, maybe because a worker is dead
            logger.warning("the rollout did not end cleanly: %s", error or type(error).__name__)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T], then: Callable[[T], None] = lambda result: None) -> T:
        """Run it in the rollout thread. If the step is given up meanwhile, it is cancelled unless it has ended.

        then: called with its result before the step can be discarded.
        """
        tasks: list[asyncio.Task[Any]] = []

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            if step_stop.is_given_up():
                coroutine.close()
                raise asyncio.CancelledError
            return await coroutine

        def cancel() -> None:
            for task in tasks:
                self._loop.call_soon_threadsafe(task.cancel)

        name = f"rollout thread, {getattr(coroutine, '__name__', 'call').strip('_')}"
        with waiting("queue", name), step_stop.given_up_by(cancel):
            result = asyncio.run_coroutine_threadsafe(cancellable(), self._loop).result()
            then(result)
            return result

    async def _add(self, groups: list[Group]) -> None:
        self.schedule.waiting.extend(groups)

    async def _start(self, step: int) -> None:
        for group in self.schedule.start(step):
            samples = self.journal.recover(group)
            if samples is not None and len(samples) == self.sampler.n:
                self._end(group, samples)
            else:
                self.journal.note("start", group=group.id, step=step)
                self._tasks[group.id] = self._loop.create_task(self._sample(group))
        self._note_busy()

    async def _sample(self, group: Group) -> None:
        try:
            samples = await self._samples(group)
            self._end(group, samples)
            if group.samples is not None:
                self.journal.finish(group)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            self._failure = self._failure or error
        finally:
            del self._tasks[group.id]
            self._note_busy()
            self._changed.set()

    async def _samples(self, group: Group) -> DataProto:
        """Sampled again if conversations end, with the failure of the rollout, after it was repaired."""
        batch, row = group.id
        while True:
            num_repairs = self._num_repairs
            try:
                return await self.sampler.sample(group.prompt, step=batch, draw=0, number=row)
            except REPAIRABLE:
                if num_repairs == self._num_repairs:
                    raise

    def _end(self, group: Group, samples: DataProto) -> None:
        if self.is_kept(samples):
            self.schedule.finish(group, samples)
        else:
            self._drop(group, group.started, "filtered")

    def _drop(self, group: Group, step: int, reason: str) -> None:
        self.schedule.drop(group)
        self.num_dropped[reason] += 1
        self.journal.note("drop", group=group.id, step=step, reason=reason)
        if (task := self._tasks.get(group.id)) is not None and reason == "stale":
            task.cancel()

    async def _take(self, step: int) -> list[Group] | None:
        while True:
            self._raise_failure()
            for group in self.schedule.too_old(step):
                self._drop(group, step, "stale")
            await self._start(step)
            if self.schedule.room(step) > 0:
                return None
            if (groups := self.schedule.take(step)) is not None:
                return groups
            self._changed.clear()
            await self._changed.wait()

    async def _finish_all(self) -> None:
        while self.schedule.running:
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        self._raise_failure()

    async def _resume(self) -> None:
        if self._serving is None:
            self._serving = AsyncExitStack()
            await self._serving.enter_async_context(self.sampler.running())
        elif self._is_paused:
            await self.sampler.client.resume()
        self._is_paused = False
        self._note_busy()

    async def _pause(self) -> None:
        await self._interrupt()
        self._raise_failure()

    async def _interrupt(self) -> bool:
        if self._is_paused:
            return False
        await self.sampler.client.pause()
        self._is_paused = True
        self._note_busy()
        return True

    async def _recover(self, generate: bool) -> None:
        self._failure = None
        self._num_repairs += 1
        self.sampler.client.forget_failure()
        if generate:
            await self._resume()
        for group in self.schedule.running.values():
            if group.id not in self._tasks:
                self._tasks[group.id] = self._loop.create_task(self._sample(group))

    async def _groups(self) -> list[Group]:
        schedule = self.schedule
        return [*schedule.waiting, *schedule.running.values(), *schedule.finished.values()]

    async def _take_busy_s(self) -> float:
        self._note_busy()
        seconds, self._busy_s = self._busy_s, 0.0
        return seconds

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._serving is not None:
            await self._serving.aclose()

    def _note_busy(self) -> None:
        now = time.perf_counter()
        if self._busy_since:
            self._busy_s += now - self._busy_since
        self._busy_since = now if self.schedule.running and not self._is_paused else 0.0

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
