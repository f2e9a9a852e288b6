"""The Ray backend: each worker is a Ray actor in a separate process.

cluster.py       connect to Ray or start it; resources of the cluster
console.py       the driver's console in another process
reservation.py   placement groups and worker processes in them
pool.py          RayResourcePool: the machines of worker groups
host.py          WorkerHost: the actor class
group.py         RayWorkerGroup: starts and calls the processes
futures.py       RayFuture, and how failures reach the caller
message_process.py  RayProcess: one object in a process that needs no reservation
serialize.py     DataProto in the object store

Worker methods read their argument batches directly from the object store, so a method must clone a tensor before writing
to it in place; otherwise an error names the tensor. With GPUs each process sees only its own as cuda:0, and LOCAL_RANK is 0.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.single_controller.ray_backend.cluster import connect, disconnect, has_gpus
    from lockstep.single_controller.ray_backend.futures import RayFuture, WorkerDiedError
    from lockstep.single_controller.ray_backend.group import RayClassWithInitArgs, RayWorkerGroup, make_ray_backend
    from lockstep.single_controller.ray_backend.pool import RayResourcePool

_EXPORTS = {
    "cluster": ("connect", "disconnect", "has_gpus"),
    "futures": ("RayFuture", "WorkerDiedError"),
    "group": ("RayClassWithInitArgs", "RayWorkerGroup", "make_ray_backend"),
    "pool": ("RayResourcePool",),
}
"""Module -> its public names, imported on first use."""

__all__ = [
    "RayClassWithInitArgs",
    "RayFuture",
    "RayResourcePool",
    "RayWorkerGroup",
    "WorkerDiedError",
    "connect",
    "disconnect",
    "has_gpus",
    "make_ray_backend",
]


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
