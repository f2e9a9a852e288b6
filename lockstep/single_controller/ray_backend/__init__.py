"""The Ray backend: each worker is an actor, a process of its own on a machine of the cluster.

cluster.py       joining or starting Ray, what the machines have
console.py       the driver's console in another process
surroundings.py  working directory and module path in another process
reservation.py   placement groups and processes on them
pool.py          RayResourcePool: the machines of worker groups
host.py          WorkerHost: what runs in each process
group.py         RayWorkerGroup: starts the processes and calls them
futures.py       RayFuture, and how failures reach the caller
wire.py          DataProto in the object store

A worker method reads the batches of its arguments where they lie in the object store: to write into a tensor in place it
clones it first; forgetting that is an error by name. With GPUs each process sees its own one, as cuda:0,
and its LOCAL_RANK is 0.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.single_controller.ray_backend.cluster import connect, disconnect, has_gpus
    from lockstep.single_controller.ray_backend.futures import RayFuture, WorkerDiedError, WorkerError
    from lockstep.single_controller.ray_backend.group import RayClassWithInitArgs, RayWorkerGroup, make_ray_backend
    from lockstep.single_controller.ray_backend.pool import RayResourcePool

_HOMES = {
    "cluster": ("connect", "disconnect", "has_gpus"),
    "futures": ("RayFuture", "WorkerDiedError", "WorkerError"),
    "group": ("RayClassWithInitArgs", "RayWorkerGroup", "make_ray_backend"),
    "pool": ("RayResourcePool",),
}
"""Module to the names it has, imported when first asked for."""

__all__ = [
    "RayClassWithInitArgs",
    "RayFuture",
    "RayResourcePool",
    "RayWorkerGroup",
    "WorkerDiedError",
    "WorkerError",
    "connect",
    "disconnect",
    "has_gpus",
    "make_ray_backend",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
