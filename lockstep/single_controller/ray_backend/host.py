"""WorkerHost: what runs in each Ray actor. It prepares the process, constructs the worker in it and calls its methods.

Torch is imported in the actor alone, so that whoever starts one need not wait for it.
"""

import asyncio
import importlib
import inspect
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.single_controller.ray_backend.surroundings import Surroundings

if TYPE_CHECKING:
    from lockstep.single_controller.worker import Place


@dataclass(frozen=True)
class ProcessInfo:
    """Where an actor runs: the machine's address, the process id, the placement group it is in."""

    address: str
    pid: int
    placement_group: Any


class WorkerHost:
    """The process of one worker."""

    def __init__(self, surroundings: Surroundings | None = None, preload: Sequence[str] = ()) -> None:
        """surroundings: of the controller, to be those of the worker too. preload: modules to import now."""
        if surroundings is not None:
            has_own = "working_dir" in ray.get_runtime_context().runtime_env  # a copy that Ray made on this machine
            surroundings.adopt(move=not has_own)
        for module in preload:
            importlib.import_module(module)
        from lockstep.single_controller.worker import Place

        self._worker: Any = None
        self._place = Place()
        self._environment: dict[str, str] = {}

    def info(self) -> ProcessInfo:
        return ProcessInfo(ray.util.get_node_ip_address(), os.getpid(), ray.util.get_current_placement_group())

    def place(self) -> "Place":
        """Where the worker stands in its group."""
        return self._place

    def master(self) -> tuple[str, int]:
        """Address and port of the group's rank 0, as `torch.distributed` uses them."""
        return self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])

    def free_port(self) -> int:
        """A port of this machine that nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def construct(self, construct: Callable[[], Any], place: "Place", environment: dict[str, str], note: str) -> None:
        """Make the worker, its environment set first: `torch.distributed` finds its rank and master there."""
        from lockstep.single_controller.ray_backend.futures import portable
        from lockstep.single_controller.worker import placed_at

        os.environ.update(environment)
        self._place, self._environment = place, environment
        try:
            with placed_at(place):
                self._worker = construct()
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            raise portable(error, note) from None

    def call(self, method: str, note: str, /, *args: Any, **kwargs: Any) -> Any:
        """One method call of the worker; what it raises travels with `note`."""
        from lockstep.single_controller.ray_backend.futures import portable
        from lockstep.single_controller.ray_backend.wire import pack, refuse_writes, tensors_in, unpack

        try:
            args = tuple(unpack(arg, writable=False) for arg in args)
            kwargs = {name: unpack(arg, writable=False) for name, arg in kwargs.items()}
            stored = tensors_in([*args, *kwargs.values()])
            output = getattr(self._worker, method)(*args, **kwargs)
            if inspect.iscoroutine(output):
                output = asyncio.run(output)
            refuse_writes(stored, f"{type(self._worker).__name__}.{method}")
            return pack(output)
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            raise portable(error, note) from None
