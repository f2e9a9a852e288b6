"""The local backend: workers are plain objects in this process and run one after another, so `breakpoint()` works.

Arguments and outputs are passed by reference. Several workers are allowed if their methods use no collectives.
"""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from lockstep.single_controller.dispatch import Execute, separate_batch
from lockstep.single_controller.futures import Future, FutureList
from lockstep.single_controller.worker import worker_place
from lockstep.single_controller.worker_group import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
from lockstep.utils import step_stop


class LocalFuture(Future):
    """A finished output, or the exception that was raised."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self._value = value
        self._error = error

    def get(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class LocalWorkerGroup(WorkerGroup):
    """Workers in this process. A non-blocking call runs to completion; `get` raises its exception."""

    def _start_workers(self) -> list[Any]:
        workers = []
        for place in self.resource_pool.places():
            with worker_place(place):
                try:
                    workers.append(self.cls_with_init())
                except Exception as error:
                    error.add_note(self.failure_note(place.rank, "__init__"))
                    raise
        return workers

    def _execute(
        self,
        method_name: str,
        execute_mode: Execute,
        shares: Sequence[Sequence[Any]],
        named_shares: dict[str, Sequence[Any]],
    ) -> FutureList:
        separate = [_separated(share) for share in shares]
        named: dict[str, Sequence[Any]] = {name: _separated(share) for name, share in named_shares.items()}
        return super()._execute(method_name, execute_mode, separate, named)

    def _submit(self, rank: int, method_name: str, args: list[Any], kwargs: dict[str, Any]) -> LocalFuture:
        try:
            with step_stop.shielded():
                output = getattr(self.workers[rank], method_name)(*args, **kwargs)
                return LocalFuture(asyncio.run(output) if inspect.iscoroutine(output) else output)
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            error.add_note(self.failure_note(rank, method_name))
            return LocalFuture(error=error)


def _separated(share: Sequence[Any]) -> list[Any]:
    """Every rank's own batch, if several get the same one."""
    seen: set[int] = set()
    separate = []
    for value in share:
        separate.append(separate_batch(value) if id(value) in seen else value)
        seen.add(id(value))
    return separate


LOCAL = Backend("local", ResourcePool, ClassWithInitArgs, LocalWorkerGroup)
