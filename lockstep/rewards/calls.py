"""Call a reward function on many rows; each row's outcome is the function's result or an exception.

How a function is called (`make_caller`):

    ensemble                       each of its functions in its own way, all at once
    coroutine function             concurrently in one event loop, each call limited to `timeout_s`
    built in                       inline, or in threads if that takes long: the built-in scorers have their own time limits
    no timeout                     inline, one row after another
    importable by name             in worker processes, each killed and replaced if a call hangs or crashes
    anything else (lambda, class)  in a thread, which is abandoned if a call hangs
"""

import asyncio
import inspect
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from lockstep.registry import USER_MODULE
from lockstep.rewards.default import default_compute_score, default_compute_scores, external_scorers
from lockstep.rewards.ensemble import Ensemble
from lockstep.rewards.errors import RewardHangError
from lockstep.rewards.monitor import CallMonitor, place, raised_at
from lockstep.rewards.rate_limit import RateLimiter
from lockstep.rewards.worker_pool import WorkerPool, worker_task
from lockstep.utils.progress import waiting

logger = logging.getLogger(__name__)

Arguments = dict[str, Any]
Outcome = Any
"""The result of a call, or an Exception."""
Caller = Callable[[list[Arguments]], list[Outcome]]

THREAD_GRACE_S = 5.0
LOOP_CHECK_S = 0.1
INLINE_S = 0.25
"""How long built-in scorers are called one after another."""
MAX_DEFAULT_WORKERS = 16


def make_caller(
    function: Callable[..., Any],
    timeout_s: float | None = None,
    num_workers: int | None = None,
    max_concurrency: int = 64,
    always_workers: bool = False,
    limiter: RateLimiter | None = None,
) -> Caller:
    """Choose how to call `function`.

    num_workers:    most worker processes or threads; None is the number of cores, at most 16.
    always_workers: require worker processes.
    limiter:        each call of a coroutine function begins in one of its slots.
    """
    if isinstance(function, Ensemble):
        parts = [part.function for part in function.parts.values()]
        check_limited(parts, limiter)

        def make(part: Callable[..., Any]) -> Caller:
            return make_caller(
                part, timeout_s, num_workers, max_concurrency, always_workers, limiter if is_async(part) else None
            )

        return function.caller(make)
    check_limited([function], limiter)
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"reward_model.timeout_s={timeout_s:g}: must be above 0, or null for no limit")
    num_workers = default_num_workers() if num_workers is None else num_workers
    if num_workers < 1:
        raise ValueError(f"reward_model.reward_kwargs.num_workers={num_workers}: must be at least 1")
    if always_workers or not (is_async(function) or timeout_s is None or _has_own_limit(function)):
        task = worker_task(function, _external_scorers(function))
        if task is not None:
            return WorkerPool(task, num_workers, timeout_s)
        if always_workers:
            raise ValueError(
                f"the reward function {function_name(function)} cannot be called in another process: define it at the top "
                "level of a module, or set reward_model.reward_manager=naive"
            )
    if is_async(function):
        if getattr(function, "limits_itself", False):
            timeout_s = limiter = None
        return lambda rows: _ConcurrentCalls(function, timeout_s, max_concurrency, limiter, rows).outcome_of_all()
    if _has_own_limit(function):
        return partial(_call_built_in, function, num_workers)
    if timeout_s is None:
        return partial(_call_inline, function)
    return partial(_call_in_thread, function, timeout_s)


def check_limited(functions: list[Callable[..., Any]], limiter: RateLimiter | None) -> None:
    """ValueError if there are limits on calls, and no function that they apply to."""
    if limiter is not None and not any(map(is_async, functions)):
        raise ValueError(
            "reward_model.max_concurrent, max_rpm and max_tpm limit coroutine functions and judges; define "
            f"{function_name(functions[0])} with `async def`, or set them to null, and reward_model.reward_manager=naive "
            "instead of rate_limited"
        )


def default_num_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_DEFAULT_WORKERS)


def _has_own_limit(function: Callable[..., Any]) -> bool:
    return _unwrap(function) in (default_compute_score, default_compute_scores) and not _external_scorers(function)


def _external_scorers(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The user's scorers that the default function may call."""
    if _unwrap(function) not in (default_compute_score, default_compute_scores):
        return []
    keywords = function.keywords if isinstance(function, partial) else {}
    return external_scorers(keywords.get("scorer"))


def _call_inline(function: Callable[..., Any], rows: list[Arguments]) -> list[Outcome]:
    monitor = CallMonitor(function_name(function), rows, None)
    outcomes = []
    for row in range(len(rows)):
        monitor.report(time.monotonic())
        outcomes.append(_attempt(function, monitor, row))
        monitor.finished()
    return outcomes


def _call_built_in(function: Callable[..., Any], num_workers: int, rows: list[Arguments]) -> list[Outcome]:
    """One row after another; after INLINE_S the rest in threads, since slow scorers wait for programs and graders elsewhere."""
    monitor = CallMonitor(function_name(function), rows, None)
    outcomes: list[Outcome] = []
    end = time.monotonic() + INLINE_S
    while len(outcomes) < len(rows) and (num_workers == 1 or time.monotonic() < end):
        monitor.report(time.monotonic())
        outcomes.append(_attempt(function, monitor, len(outcomes)))
        monitor.finished()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="rewards") as threads:
        for outcome in threads.map(partial(_attempt, function, monitor), range(len(outcomes), len(rows))):
            outcomes.append(outcome)
            monitor.finished()
            monitor.report(time.monotonic())
    return outcomes


def _attempt(function: Callable[..., Any], monitor: CallMonitor, row: int) -> Outcome:
    with waiting("reward", monitor.call(row)):
        return _call(function, monitor.rows[row])


def _call(function: Callable[..., Any], row: Mapping[str, Any]) -> Outcome:
    try:
        return function(**row)
    except SystemExit as error:
        return _exit_error(error)
    except Exception as error:  # noqa: BLE001 (boundary to user code; the manager reports it)
        return error


def _exit_error(error: SystemExit) -> RuntimeError:
    return RuntimeError(f"the reward function called exit({error.code!r})")


def _call_in_thread(function: Callable[..., Any], timeout_s: float, rows: list[Arguments]) -> list[Outcome]:
    monitor = CallMonitor(function_name(function), rows, timeout_s)
    outcomes: list[Outcome] = []
    while len(outcomes) < len(rows):
        done: queue.Queue[Outcome] = queue.Queue()
        rest = range(len(outcomes), len(rows))
        # A thread cannot be stopped, so start a new one after each call that hangs.
        arguments = (function, [rows[row] for row in rest], done)
        thread = threading.Thread(target=_call_each, args=arguments, name="rewards", daemon=True)
        thread.start()
        for row in rest:
            began = time.monotonic()
            monitor.report(began)
            try:
                with waiting("reward", monitor.call(row)):
                    outcomes.append(done.get(timeout=timeout_s))
                monitor.finished()
            except queue.Empty:
                number = len(outcomes)
                outcomes.append(monitor.timed_out(number, began, len(rows) - number - 1, _place(thread)))
                logger.warning(
                    "%s timed out; abandoning its thread. Define it at the top level of a module to run it in a process "
                    "that can be killed",
                    function_name(function),
                )
                break
    return outcomes


def _call_each(function: Callable[..., Any], rows: list[Arguments], done: "queue.Queue[Outcome]") -> None:
    for row in rows:
        done.put(_call(function, row))


def _place(thread: threading.Thread) -> str:
    """Where a thread is now, in one line; empty if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return place(reversed(traceback.extract_stack(frame))) if frame is not None else ""


class _ConcurrentCalls:
    """Coroutines of all rows in one event loop.

    loop_seen: when the loop last ran one of our callbacks.
    error:     why the calls were stopped.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout_s: float | None,
        max_concurrency: int,
        limiter: RateLimiter | None,
        rows: list[Arguments],
    ) -> None:
        self.function = function
        self.limits_itself = getattr(function, "limits_itself", False)  # and names what it waits for
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self.limiter = limiter
        self.rows = rows
        self.monitor = CallMonitor(function_name(function), rows, timeout_s)
        self.outcomes: list[Outcome] = [None] * len(rows)
        self.began: dict[int, float] = {}  # of the running calls
        self.loop_seen = time.monotonic()
        self.error: BaseException | None = None

    def outcome_of_all(self) -> list[Outcome]:
        """Run the event loop in a separate thread, since the caller may be inside a running loop."""
        timeout_s = self.timeout_s
        thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        thread.start()
        while thread.is_alive() and self.error is None:
            thread.join(LOOP_CHECK_S)
            # asyncio.timeout limits each coroutine, but not one that blocks the loop.
            blocked_s = time.monotonic() - self.loop_seen
            if thread.is_alive() and timeout_s is not None and blocked_s > timeout_s + THREAD_GRACE_S:
                name = function_name(self.function)
                raise RewardHangError(
                    f"the reward function {name} blocks its event loop for {blocked_s:.0f} s, longer than "
                    f"reward_model.timeout_s={timeout_s:g}, at {_place(thread)}. Await there, or define it without `async`"
                )
        if self.error is not None:
            raise self.error
        return self.outcomes

    def _run(self) -> None:
        try:
            asyncio.run(self._call_all())
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            self.error = error

    async def _call_all(self) -> None:
        slots = asyncio.Semaphore(self.max_concurrency)
        watch = asyncio.create_task(self._watch())
        async with _running(self.function):
            tasks = [asyncio.create_task(self._call(number, slots)) for number in range(len(self.rows))]
            try:
                await asyncio.gather(*tasks)
            except RewardHangError as error:
                self.error = error  # set now: a coroutine may ignore that it is cancelled
                raise
        watch.cancel()

    async def _watch(self) -> None:
        while True:
            self.loop_seen = time.monotonic()
            self.monitor.report(min(self.began.values(), default=None))
            await asyncio.sleep(LOOP_CHECK_S)

    async def _call(self, number: int, slots: asyncio.Semaphore) -> None:
        async with slots if self.limiter is None else self.limiter.slot():
            self.loop_seen = self.began[number] = time.monotonic()
            limit = asyncio.timeout(self.timeout_s)
            try:
                with nullcontext() if self.limits_itself else waiting("reward", self.monitor.call(number)):
                    async with limit:
                        self.outcomes[number] = await self.function(**self.rows[number])
            except SystemExit as error:
                self.outcomes[number] = _exit_error(error)
            except Exception as error:  # noqa: BLE001 (boundary to user code; the manager reports it)
                self.outcomes[number] = error
            outcome = self.outcomes[number]
            began = self.began.pop(number)
            if limit.expired() and isinstance(outcome, Exception):
                num_waiting = len(self.rows) - self.monitor.num_done - len(self.began) - 1
                where = raised_at(outcome.__cause__) if outcome.__cause__ is not None else ""  # where it was cancelled
                self.outcomes[number] = self.monitor.timed_out(number, began, num_waiting, where)
            else:
                self.monitor.finished()


@asynccontextmanager
async def _running(function: Callable[..., Any]) -> AsyncIterator[None]:
    """For a function that needs something in the event loop, such as connections."""
    if hasattr(function, "running"):
        async with function.running():
            yield
    else:
        yield


def is_async(function: Any) -> bool:
    """Whether calling `function` returns a coroutine; sees through `functools.partial` and callable objects."""
    function = _unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def function_name(function: Any) -> str:
    """`module.name` of a function, or `file.py:name` if it was loaded from a file, for messages."""
    function = _unwrap(function)
    if label := getattr(function, "label", None):  # a judge or an ensemble
        return str(label)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None) or "?"
    if module.startswith(USER_MODULE) and module in sys.modules:
        return f"{sys.modules[module].__file__}:{name}"
    return f"{module}.{name}"


def _unwrap(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function
