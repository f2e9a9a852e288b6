"""Scores samples while others are still generated.

score ─► waits for the call before ─► rows with responses ─► reward model ─► reward function ─► ScoredGroup

All samples that wait are scored in one call: the reward function is never called twice at a time, and uses all of its workers.
Calls begin `MIN_INTERVAL_S` apart as long as others are generated: each one delays the launches of generation.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, TypeVar

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.sampling import FailureLimit, RewardFn, concat_unfilled, with_scores
from lockstep.utils.spans import span

T = TypeVar("T")

MIN_INTERVAL_S = 0.1


@dataclass(eq=False)
class ScoredGroup:
    """Samples of one prompt, within the rows of the calls that scored them.

    parts:    the rows of a call with `token_level_scores` and the reward function's columns, in which failed rows are None; and
              which of them are these samples.
    baseline: score of the prompt's greedy response, if the estimator needs it.
    """

    parts: list[tuple[DataProto, slice]]
    baseline: float | None = None

    @classmethod
    def joined(cls, samples: "Sequence[ScoredGroup]") -> "ScoredGroup":
        return cls([part for group in samples for part in group.parts])

    def rows(self) -> DataProto:
        """The samples as a batch."""
        parts = [call[rows] for call, rows in self.parts]
        return parts[0] if len(parts) == 1 else concat_unfilled(parts)


@dataclass(eq=False)
class _Waiting:
    batch: Any
    places: Sequence[int]
    responses: Sequence[Any]
    future: "asyncio.Future[ScoredGroup]"


class GroupScorer:
    """
    with_responses: (batch, places, responses) -> rows of a `PromptBatch`, at these places, with their responses.
    rm_wg:          None without a reward model. It may share its processes with the rollout.
    submission:     held while calls are submitted to workers, so that all ranks get them in the same order.
    batch_rows:     this many failed rows stop the run, see `FailureLimit`.
    is_generating:  whether further samples are generated.
    busy_s:         seconds spent in calls since `begin`.
    """

    def __init__(
        self,
        with_responses: Callable[[Any, Sequence[int], Sequence[Any]], DataProto],
        rm_wg: Any,
        reward_fn: RewardFn,
        submission: threading.Lock,
        batch_rows: int,
        is_generating: Callable[[], bool],
    ) -> None:
        self.rm_wg = rm_wg
        self.reward_fn = FailureLimit(reward_fn, batch_rows)
        self._with_responses = with_responses
        self._submission = submission
        self._is_generating = is_generating
        self._calling = threading.Lock()  # a failure of the rollout may leave a call behind
        self.begin()

    def begin(self) -> None:
        """Forget what was counted, and calls of an event loop that has ended."""
        self.busy_s = 0.0
        self.reward_fn.reset()
        self._waiting: list[_Waiting] = []
        self._in_progress: asyncio.Future[DataProto] | None = None
        self._next_call: asyncio.TimerHandle | None = None
        self._last_began = float("-inf")

    async def end(self) -> None:
        """Wait for the call in progress, also if its groups were cancelled: nothing else may call the function or the workers."""
        if self._next_call is not None:
            self._next_call.cancel()
        if self._in_progress is not None:
            await asyncio.wait([self._in_progress])

    async def score(self, batch: Any, places: Sequence[int], responses: Sequence[Any]) -> ScoredGroup:
        """Score the rows of a `PromptBatch` at `places`, whose responses are complete."""
        future: asyncio.Future[ScoredGroup] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(batch, places, responses, future))
        self._plan_call()
        return await future

    def _plan_call(self) -> None:
        """Score what waits, after the call in progress."""
        if self._in_progress is not None and not self._in_progress.done():
            return
        if self._next_call is not None:
            self._next_call.cancel()
        loop = asyncio.get_running_loop()
        is_early = self._is_generating()
        # what completes together is scored together
        self._next_call = loop.call_at(self._last_began + MIN_INTERVAL_S if is_early else loop.time(), self._call)

    def _call(self) -> None:
        waiting = [group for group in self._waiting if not group.future.done()]  # others were cancelled
        meta = waiting[0].batch.rows.meta_info if waiting else {}  # a call is for one step
        taken = [group for group in waiting if group.batch.rows.meta_info == meta]
        self._waiting = [group for group in waiting if group.batch.rows.meta_info != meta]
        if taken:
            taken.sort(key=lambda group: id(group.batch))
            self._last_began = asyncio.get_running_loop().time()
            self._in_progress = in_thread(lambda: self._scored(taken))
            self._in_progress.add_done_callback(lambda call: self._hand_out(taken, call))

    def _hand_out(self, taken: list[_Waiting], call: "asyncio.Future[DataProto]") -> None:
        if call.cancelled():
            return
        error = call.exception()
        first = 0
        for group in taken:
            rows = slice(first, first + len(group.places))
            first = rows.stop
            if group.future.done():
                continue
            if error is not None:
                group.future.set_exception(error)
            else:
                group.future.set_result(ScoredGroup([(call.result(), rows)]))
        if self._waiting:
            self._plan_call()

    def _rows(self, taken: list[_Waiting]) -> DataProto:
        parts = []
        for _, same in groupby(taken, key=lambda group: id(group.batch)):
            groups = list(same)
            places = list(chain.from_iterable(group.places for group in groups))
            responses = list(chain.from_iterable(group.responses for group in groups))
            parts.append(self._with_responses(groups[0].batch, places, responses))
        return parts[0] if len(parts) == 1 else DataProto.concat(parts)

    def _scored(self, taken: list[_Waiting]) -> DataProto:
        with self._calling:
            began = time.perf_counter()
            batch = self._rows(taken)
            with span("reward", ("rewards", 0)):
                batch = with_scores(batch, self.rm_wg, self.reward_fn, self._submission)
            self.busy_s += time.perf_counter() - began
        return batch


def in_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Call `function` in a daemon thread: a call that hangs does not keep the program from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        result = error = None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001 - raised by the future
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=call, name="rewards", daemon=True).start()
    return future
