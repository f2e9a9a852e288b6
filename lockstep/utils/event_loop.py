"""Calls in an event loop: many at once, and from code that may already run in one."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lockstep.utils import step_stop

T = TypeVar("T")


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls, in their order; if one fails, the others are cancelled and its exception is raised.

    None is still running afterwards: cancelled calls have released what they hold.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel the tasks that are not done, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run`, in another thread if this one already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_running = False
    else:
        is_running = True
    if not is_running:  # not in the `except`: errors of `main` would have the RuntimeError as their context
        return _run(main)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(main())).result()


def _run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run`; if the step is given up meanwhile, `main` is cancelled and may clean up."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        if step_stop.is_given_up():  # before the loop ran
            raise asyncio.CancelledError
        return await main()

    def cancel() -> None:
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)

    with step_stop.given_up_by(cancel):
        return asyncio.run(cancellable())
