"""Threads that run calls of users' code, so that one that blocks holds up nothing else.

run_in_thread ─► an idle thread, or a new one ─► its event loop runs the call ─► idle again

A thread whose call exceeded its deadline or left tasks behind ends instead: what still runs there must not hold up the next call.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from lockstep.agents.tools import child_processes
from lockstep.utils.event_loop import cancelled

T = TypeVar("T")

GRACE_S = 1.0
"""Time after the deadline in which a call that does not block can end by itself."""
MAX_CALLS = 64
"""Calls that run at a time for one event loop."""
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run_in_thread(start: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
    """Run a coroutine in a thread with its own event loop; TimeoutError `timeout_s` after its start.

    A thread that blocks is left behind: it cannot be killed, but holds up nothing else.
    """
    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CALLS)):
        future: Future[T] = Future()
        try:
            thread = _idle.pop()
        except IndexError:
            thread = _Thread()
        thread.begin(start, timeout_s, future)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s + GRACE_S)


def end_child_processes() -> None:
    """End the processes that calls have left running, also those of threads that still block."""
    for thread in list(_threads):
        thread.note_children()
    child_processes.end_noted()


class _Thread:
    """Runs one call at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._id: int | None = None
        _threads.add(self)
        threading.Thread(target=self._run, name="tool", daemon=True).start()

    def note_children(self) -> None:
        """Processes that its calls left running end with the run."""
        if self._id is not None:
            child_processes.note_children(self._id)

    def _run(self) -> None:
        self._id = threading.get_native_id()
        asyncio.set_event_loop(self._loop)
        while not self._is_over:
            # SystemExit of a task passes through the loop; who awaits the task gets it too
            with suppress(BaseException):
                self._loop.run_forever()
        self._loop.close()

    def begin(self, start: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, future: "Future[T]") -> None:
        """Run a call; `future` gets its outcome."""

        def create() -> None:
            self._task = self._loop.create_task(self._call(start, timeout_s, future))

        self._loop.call_soon_threadsafe(create, context=Context())

    async def _call(self, start: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, future: "Future[T]") -> None:
        result, error = None, None
        child_processes.begin_call()
        try:
            async with asyncio.timeout(timeout_s):
                result = await start()
        except BaseException as raised:  # noqa: BLE001 - a tool may raise anything, SystemExit too
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        self.note_children()
        left_behind = asyncio.all_tasks() - {self._task}
        can_be_used_again = not left_behind and not isinstance(error, TimeoutError)
        if can_be_used_again:
            _idle.append(self)
        _settle(future, result, error)
        if not can_be_used_again:
            await cancelled(left_behind)
            self._is_over = True
            self._loop.stop()


def _settle(future: "Future[Any]", result: Any, error: Exception | None) -> None:
    """Set the outcome, unless the caller has given up."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


_idle: deque[_Thread] = deque()
_threads: WeakSet[_Thread] = WeakSet()
for found in (_idle, _threads):
    os.register_at_fork(after_in_child=found.clear)  # a forked process has none of the threads
