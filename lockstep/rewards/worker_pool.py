"""Worker processes that call a reward function. If a call hangs or crashes, its row fails and the process is replaced.

    WorkerPool --pickled rows--> worker.py, one call at a time --pickled outcomes--> WorkerPool

A worker is a fresh interpreter that imports the function by name; it shares no threads and no GPU with the trainer.
"""

import logging
import pickle
import selectors
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.registry import USER_MODULE
from lockstep.rewards.errors import RewardError, WorkerDiedError, WorkerStartError
from lockstep.rewards.monitor import CallMonitor
from lockstep.rewards.worker import CALL_AGAIN
from lockstep.rewards.worker_process import WorkerProcess, WorkerTask, message
from lockstep.utils.progress import waiting

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Time for the interpreter to start and to import the function's module."""
GROW_S = 0.25
"""Twice as many workers are started each time rows have been waiting for this long."""
LIVENESS_S = 5.0
"""How often workers are checked for life, besides reading their pipes."""
MAX_REPEATS = 3
"""Times that a row is called again because a stop signal came; a function may send itself one."""


def worker_task(function: Any, first: list[Any]) -> WorkerTask | None:
    """The task for `function`; None if it, or one of `first`, cannot be imported by name in another process."""
    kwargs: dict[str, Any] = {}
    while isinstance(function, partial) and not function.args:
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    references = [_reference(item) for item in (function, *first)]
    if any(reference is None for reference in references):
        return None
    main, *others = (reference for reference in references if reference is not None)
    return WorkerTask(main, kwargs, tuple(others))


def _reference(function: Any) -> str | None:
    name, module_name = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    module = sys.modules.get(module_name)
    if module_name == "__main__" or not name.isidentifier() or getattr(module, name, None) is not function:
        return None
    if module_name.startswith(USER_MODULE):
        return f"{getattr(module, '__file__', '')}:{name}"
    return f"{module_name}:{name}"


class WorkerPool:
    """Calls the function on rows; an outcome is a result or an exception.

    Begins with one process and starts more, up to `num_workers`, if rows wait. Rows are sent in order to whichever
    worker has room: one at a time if calls are slow, many if they are fast.
    """

    def __init__(self, task: WorkerTask, num_workers: int, timeout_s: float | None) -> None:
        self.task = task
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._target = 1
        self._grow_at = 0.0
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        # a selector is a reference cycle: without this, workers would live until the next garbage collection
        weakref.finalize(self, _end_all, self._workers)

    def __call__(self, rows: list[dict[str, Any]]) -> list[Any]:
        with self._lock:
            for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
                self._kill(worker)  # killed from outside while idle
            batch = _Batch(rows, CallMonitor(self.task.function, rows, self.timeout_s))
            self._grow_at = time.monotonic() + GROW_S
            try:
                while batch.monitor.num_done < len(rows):
                    self._start_workers(batch)
                    self._send(batch)
                    batch.monitor.report(min((worker.began for worker in self._workers if worker.rows), default=None))
                    self._receive(batch)
                    self._check_time(batch)
            except BaseException:
                # the replies of busy workers are no longer awaited
                self._kill_all(worker for worker in self._workers if worker.rows or not worker.is_ready)
                raise
            return batch.outcomes

    def close(self) -> None:
        """Stop the workers, unless a call in another thread uses them; the next call starts them again."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._kill_all(self._workers)
            self._target = 1
        finally:
            self._lock.release()

    def _start_workers(self, batch: "_Batch") -> None:
        if self._may_grow(batch) and time.monotonic() >= self._grow_at:
            self._target = min(2 * self._target, self.num_workers)
            self._grow_at = time.monotonic() + GROW_S
        num_idle = sum(not worker.rows for worker in self._workers)
        for _ in range(min(self._target - len(self._workers), len(batch.waiting) - num_idle)):
            worker = WorkerProcess(self.task)
            self._workers.append(worker)
            self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
            self._watch_stdin(worker, worker.flush())

    def _may_grow(self, batch: "_Batch") -> bool:
        return (
            self._target < self.num_workers and bool(batch.waiting) and all(worker.is_ready for worker in self._workers)
        )

    def _send(self, batch: "_Batch") -> None:
        for worker in self._workers:
            if not worker.is_ready:
                continue
            while batch.waiting and worker.has_room(len(batch.next_message()), self._max_rows(batch)):
                worker.send(*batch.take())
            self._watch_stdin(worker, worker.flush())

    def _max_rows(self, batch: "_Batch") -> int:
        """Rows that one worker may hold: half of its share of those that wait, since calls may turn slow."""
        return len(batch.waiting) // (2 * self.num_workers) if batch.prefetch else 1

    def _watch_stdin(self, worker: WorkerProcess, is_flushed: bool) -> None:
        """Wait for the pipe of a large row to take the rest of it."""
        watched = worker.stdin in self._selector.get_map()
        if is_flushed and watched:
            self._selector.unregister(worker.stdin)
        elif not is_flushed and not watched:
            self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)

    def _receive(self, batch: "_Batch") -> None:
        with self._waiting(batch):
            ready = self._selector.select(self._time_to_wait(batch))
        for key, events in ready:
            worker: WorkerProcess = key.data
            if worker not in self._workers:
                continue
            try:
                if not events & selectors.EVENT_READ:
                    self._watch_stdin(worker, worker.flush())
                elif worker.is_ready:
                    batch.add(worker.receive())
                else:
                    self._check_started(worker)
            except EOFError:
                self._on_death(worker, batch)

    def _waiting(self, batch: "_Batch") -> AbstractContextManager[Any]:
        """For the longest running call; for the first worker if none has a call."""
        busy = [worker for worker in self._workers if worker.rows] or self._workers
        if not busy:
            return nullcontext()
        worker = min(busy, key=lambda worker: worker.began)
        call = batch.monitor.call(worker.rows[0]) if worker.rows else f"{self.task.function}, being loaded"
        name = f"{call} (pid {worker.function_pid or worker.process.pid})"
        return waiting("reward", name, worker.began, worker.stacks)

    def _time_to_wait(self, batch: "_Batch") -> float:
        """Seconds to the next deadline, at most those to the next look at the processes."""
        now = time.monotonic()
        times = [now + LIVENESS_S, *(self._deadline(worker) for worker in self._workers)]
        if self._may_grow(batch):
            times.append(self._grow_at)
        return max(0.0, min(times) - now)

    def _deadline(self, worker: WorkerProcess) -> float:
        if not worker.is_ready:
            return worker.began + START_TIMEOUT_S
        if not worker.rows or self.timeout_s is None:
            return float("inf")
        return worker.began + self.timeout_s

    def _check_started(self, worker: WorkerProcess) -> None:
        problem = worker.start_problem()
        if problem is not None:
            logger.error("the reward function %s in a worker process: %s", self.task.function, problem)
            raise self._start_error(problem.strip().splitlines()[-1])
        self._grow_at = time.monotonic() + GROW_S

    def _check_time(self, batch: "_Batch") -> None:
        now = time.monotonic()
        # a process that the function has forked may keep the pipe of a dead worker open
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._on_death(worker, batch)
        for worker in [worker for worker in self._workers if now >= self._deadline(worker)]:
            place = worker.place()
            if not worker.is_ready:
                raise self._start_error(f"it took longer than {START_TIMEOUT_S:g} s, at {place or 'its start'}")
            self._kill(worker)
            batch.time_out(worker, place)

    def _on_death(self, worker: WorkerProcess, batch: "_Batch") -> None:
        how = self._kill(worker)
        if worker.is_ready:
            batch.on_death(worker, f"the process of the reward function {self.task.function} {how}")
        else:
            batch.num_failed_starts += 1
            if batch.num_failed_starts > 1:
                raise self._start_error(f"the process {how}")

    def _start_error(self, cause: str) -> WorkerStartError:
        return WorkerStartError(
            f"the reward function {self.task.function} could not be loaded in a worker process: {cause}. "
            "Set reward_model.timeout_s=null to call it in the trainer's process without a time limit"
        )

    def _kill(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        self._watch_stdin(worker, True)
        self._selector.unregister(worker.stdout)
        return worker.kill()

    def _kill_all(self, workers: Iterable[WorkerProcess]) -> None:
        for worker in list(workers):
            self._kill(worker)


class _Batch:
    """The rows of one call of the pool and their outcomes.

    waiting:  rows to send, in order.
    prefetch: send rows ahead of the replies; not after a time-out, so that rows do not wait behind one that hangs.
    """

    def __init__(self, rows: list[dict[str, Any]], monitor: CallMonitor) -> None:
        self.rows = rows
        self.monitor = monitor
        self.outcomes: list[Any] = [None] * len(rows)
        self.waiting = deque(range(len(rows)))
        self.prefetch = True
        self.num_failed_starts = 0
        self._died: set[int] = set()
        self._num_repeats: Counter[int] = Counter()
        self._oom_kills = _num_oom_kills()
        self._next: tuple[int, bytes] = (-1, b"")

    def next_message(self) -> bytes:
        if self._next[0] != self.waiting[0]:
            row = self.waiting[0]
            self._next = row, message((self.rows[row], self._num_repeats[row] < MAX_REPEATS))
        return self._next[1]

    def take(self) -> tuple[int, bytes]:
        taken, self._next = self._next, (-1, b"")
        self.waiting.popleft()
        return taken

    def add(self, replies: list[tuple[int, bytes]]) -> None:
        again = [row for row, reply in replies if reply == CALL_AGAIN]
        for row, reply in replies:
            if reply != CALL_AGAIN:
                self.outcomes[row] = _outcome(reply)
        self._num_repeats.update(again)
        self.waiting.extendleft(reversed(again))
        self.monitor.finished(len(replies) - len(again))

    def time_out(self, worker: WorkerProcess, place: str) -> None:
        """The call of the worker's first row hangs; the rows behind it wait again."""
        self.prefetch = False
        row, *behind = worker.rows
        self.waiting.extendleft(reversed(behind))
        self.waiting.rotate(len(self.waiting) // 2)  # neighbours are samples of the same prompt, and may all hang
        self.outcomes[row] = self.monitor.timed_out(row, worker.began, len(self.waiting), place)

    def on_death(self, worker: WorkerProcess, how: str) -> None:
        """Call the worker's first row again, in case the process was killed from outside; if that is the second time, it failed."""
        if not worker.rows:
            return
        row, *behind = worker.rows
        self.waiting.extendleft(reversed(behind))
        if row not in self._died:
            self._died.add(row)
            self.waiting.appendleft(row)
            logger.warning("%s on row %d of %d; calling it again", how, row, len(self.rows))
        elif "SIGKILL" in how and _num_oom_kills() > self._oom_kills:
            raise RewardError(
                f"{how} twice on row {row}: the machine is out of memory. Use fewer workers "
                "(reward_model.reward_kwargs.num_workers) or a function that needs less"
            )
        else:
            self.outcomes[row] = WorkerDiedError(f"{how}, twice on the same row")
            self.monitor.finished()


def _end_all(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()


def _outcome(reply: bytes) -> Any:
    try:
        return pickle.loads(reply)
    except Exception as error:  # noqa: BLE001 (unpickling raises what the classes raise)
        return TypeError(f"the result of the reward function cannot be unpickled: {error!r}")


def _num_oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
