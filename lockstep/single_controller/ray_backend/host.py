"""WorkerHost: the Ray actor class. It sets up the process, constructs the worker and calls its methods.

Torch is imported only in the actor, so that starting one does not wait for the import.
"""

import asyncio
import importlib
import inspect
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.single_controller.environment import ProcessEnvironment
from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.utils import heartbeat
from lockstep.utils.heartbeat import Link
from lockstep.utils.imports import without_collections

if TYPE_CHECKING:
    from lockstep.single_controller.worker import Place


@dataclass(frozen=True)
class ProcessInfo:
    """Where an actor runs: machine address, process id, placement group."""

    address: str
    pid: int
    placement_group: Any


class WorkerHost:
    """The process of one worker."""

    def __init__(self, environment: ProcessEnvironment | None = None, preload: Sequence[str] = ()) -> None:
        """environment: the controller's, to apply to this process. preload: modules to import now."""
        if environment is not None:
            has_own = "working_dir" in ray.get_runtime_context().runtime_env  # a copy that Ray made on this machine
            environment.apply(change_dir=not has_own)
        with without_collections():
            for module in preload:
                importlib.import_module(module)
        from lockstep.single_controller.worker import Place

        self._worker: Any = None
        self._place = Place()
        self._environment: dict[str, str] = {}

    def info(self) -> ProcessInfo:
        return ProcessInfo(ray.util.get_node_ip_address(), os.getpid(), ray.util.get_current_placement_group())

    def place(self) -> "Place":
        """The worker's rank in its group."""
        return self._place

    def master(self) -> tuple[str, int]:
        """Address and port of the group's rank 0 for `torch.distributed`."""
        return self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])

    def free_port(self) -> int:
        """An unused port of this machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def construct(
        self,
        construct: Callable[[], Any],
        place: "Place",
        environment: dict[str, str],
        note: str,
        role: str,
        link: Link | None = None,
    ) -> None:
        """Set the environment variables of `torch.distributed`, then construct the worker.

        role: for the reports to the controller. link: where they go.
        """
        from lockstep.single_controller.futures import picklable
        from lockstep.single_controller.worker import worker_place

        os.environ.update(environment)
        self._place = place
        self._environment = environment
        heartbeat.start(link, role, place.rank)
        try:
            with worker_place(place):
                self._worker = construct()
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            raise picklable(error, note) from None

    def call(self, method: str, note: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker on batches in the object store; its exception gets `note`."""
        from lockstep.single_controller.futures import picklable
        from lockstep.single_controller.ray_backend.serialize import check_unwritten, pack, tensors_in, unpack

        try:
            args = tuple(unpack(arg, writable=False) for arg in args)
            kwargs = {name: unpack(arg, writable=False) for name, arg in kwargs.items()}
            stored = tensors_in([*args, *kwargs.values()])
            output = self._run(method, args, kwargs)
            check_unwritten(stored, f"{type(self._worker).__name__}.{method}")
            return pack(output)
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            raise picklable(error, note) from None

    def call_on_copies(self, method: str, note: str, /, *args: Any, **kwargs: Any) -> Any:
        """Like `call`, but the method may write into its arguments, and `ray.get` returns its output."""
        from lockstep.single_controller.futures import picklable
        from lockstep.single_controller.ray_backend.serialize import unpack

        try:
            return self._run(method, tuple(map(unpack, args)), {name: unpack(arg) for name, arg in kwargs.items()})
        except Exception as error:  # noqa: BLE001 - the boundary between worker and controller
            raise picklable(error, note) from None

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from lockstep.single_controller.colocated import owner_of
        from lockstep.single_controller.dispatch import is_collected

        function = getattr(self._worker, method)
        output = function(*args, **kwargs)
        output = asyncio.run(output) if inspect.iscoroutine(output) else output
        return output if is_collected(owner_of(self._worker, function), function) else None
