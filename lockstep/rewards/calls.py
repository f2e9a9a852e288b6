"""Call a reward function on many rows; each row's outcome is the function's result or an exception.

How a function is called (`make_caller`):

    coroutine function             concurrently in one event loop, each call limited to `timeout_s`
    no timeout, or built in        inline, one row after another: the built-in scorers have their own time limits
    importable by name             in worker processes, which are killed and replaced if a call hangs or crashes
    anything else (lambda, class)  in a thread, which is abandoned if a call hangs
"""

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.rewards.default import default_compute_score, default_compute_scores, external_scorers
from lockstep.rewards.worker_pool import RewardTimeoutError, WorkerPool, worker_task

logger = logging.getLogger(__name__)

Arguments = dict[str, Any]
Outcome = Any
"""The result of a call, or an Exception."""
Caller = Callable[[list[Arguments]], list[Outcome]]

THREAD_GRACE_S = 5.0


def make_caller(
    function: Callable[..., Any],
    timeout_s: float | None = None,
    num_workers: int = 1,
    max_concurrency: int = 64,
    always_workers: bool = False,
) -> Caller:
    """Choose how to call `function`; `always_workers` requires worker processes."""
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"reward_model.timeout_s={timeout_s:g}: must be above 0, or null for no limit")
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
        return partial(_call_concurrently, function, timeout_s, max_concurrency)
    if timeout_s is None or _has_own_limit(function):
        return partial(_call_inline, function)
    return partial(_call_in_thread, function, timeout_s)


def _has_own_limit(function: Callable[..., Any]) -> bool:
    return _unwrap(function) in (default_compute_score, default_compute_scores) and not _external_scorers(function)


def _external_scorers(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The user's scorers that the default function may call."""
    if _unwrap(function) not in (default_compute_score, default_compute_scores):
        return []
    keywords = function.keywords if isinstance(function, partial) else {}
    return external_scorers(keywords.get("scorer"))


def _call_inline(function: Callable[..., Any], rows: list[Arguments]) -> list[Outcome]:
    return [_attempt(function, row) for row in rows]


def _attempt(function: Callable[..., Any], row: Arguments) -> Outcome:
    try:
        return function(**row)
    except SystemExit as error:
        return RuntimeError(f"the reward function called exit({error.code!r})")
    except Exception as error:  # noqa: BLE001 (boundary to user code; the manager reports it)
        return error


def _call_in_thread(function: Callable[..., Any], timeout_s: float, rows: list[Arguments]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < len(rows):
        done: queue.Queue[Outcome] = queue.Queue()
        rest = rows[len(outcomes) :]
        # A thread cannot be stopped, so start a new one after each call that hangs.
        threading.Thread(target=_attempt_all, args=(function, rest, done), name="rewards", daemon=True).start()
        for _ in rest:
            try:
                outcomes.append(done.get(timeout=timeout_s))
            except queue.Empty:
                outcomes.append(RewardTimeoutError(timeout_s))
                logger.warning(
                    "%s timed out; abandoning its thread. Define it at the top level of a module to run it in a process "
                    "that can be killed",
                    function_name(function),
                )
                break
    return outcomes


def _attempt_all(function: Callable[..., Any], rows: list[Arguments], done: "queue.Queue[Outcome]") -> None:
    for row in rows:
        done.put(_attempt(function, row))


def _call_concurrently(
    function: Callable[..., Any], timeout_s: float | None, max_concurrency: int, rows: list[Arguments]
) -> list[Outcome]:
    """Run the event loop in a separate thread, since the caller may be inside a running loop."""
    late: Exception = RuntimeError("the event loop ended before the call did")
    if timeout_s is not None:
        late = RewardTimeoutError(timeout_s)
    outcomes: list[Outcome] = [late] * len(rows)

    async def call_one(number: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    outcomes[number] = await function(**rows[number])
            except Exception as error:  # noqa: BLE001 (boundary to user code; the manager reports it)
                outcomes[number] = late if limit.expired() else error

    async def call_all() -> None:
        slots = asyncio.Semaphore(max_concurrency)
        await asyncio.gather(*(call_one(number, slots) for number in range(len(rows))))

    thread = threading.Thread(target=asyncio.run, args=(call_all(),), name="rewards", daemon=True)
    thread.start()
    rounds = -(-len(rows) // max_concurrency)
    # asyncio.timeout limits each coroutine; if one blocks the loop, give up on it and on all that wait behind it.
    thread.join(None if timeout_s is None else timeout_s * rounds + THREAD_GRACE_S)
    return list(outcomes)


def is_async(function: Any) -> bool:
    """Whether calling `function` returns a coroutine; sees through `functools.partial` and callable objects."""
    function = _unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def function_name(function: Any) -> str:
    """`module.name` of a function, for messages."""
    function = _unwrap(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def _unwrap(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function
