"""verl.utils.ray_utils"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.utils import event_loop

MAX_THREADS = 16


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """Ray's references of the objects, put into its store by several threads, in their order."""
    from lockstep.single_controller.ray_backend.cluster import ray

    if not data_list:
        raise AssertionError("parallel_put: no objects")
    with ThreadPoolExecutor(max_workers or min(len(data_list), MAX_THREADS)) as threads:
        return list(threads.map(ray.put, data_list))


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread; a new one if it has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def auto_await(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a coroutine function: a coroutine calls it with `await`, other code gets the result."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        in_coroutine = caller is not None and bool(caller.f_code.co_flags & inspect.CO_COROUTINE)
        result = func(*args, **kwargs)
        return result if in_coroutine or not inspect.iscoroutine(result) else event_loop.run(lambda: result)

    return call
