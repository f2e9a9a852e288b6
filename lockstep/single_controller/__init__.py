"""A single controller that calls groups of workers as if each were one object. Independent of RL.

dispatch.py      modes, `@register`: how arguments are split and outputs joined
worker.py        Worker: base of every worker class
worker_group.py  WorkerGroup: call → dispatch → execute → collect
local.py         backend in this process
ray_backend/     backend of processes on a Ray cluster; imported, with Ray, on first use
environment.py   working directory, module path and user code in another process
message_process.py  one object in another process, with messages each way
colocated.py     several roles in one process
placement.py     roles to resource pools
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.single_controller.colocated import ColocatedWorker, create_colocated_worker_cls
    from lockstep.single_controller.dispatch import (
        Dispatch,
        Execute,
        make_nd_compute_dataproto_dispatch_fn,
        register,
        register_dispatch_mode,
    )
    from lockstep.single_controller.futures import Future, FutureList, HangError, RestartError, WorkerDiedError
    from lockstep.single_controller.local import LOCAL, LocalWorkerGroup
    from lockstep.single_controller.placement import ResourcePoolManager, Role
    from lockstep.single_controller.ray_backend import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        make_ray_backend,
    )
    from lockstep.single_controller.worker import Place, Worker, worker_place
    from lockstep.single_controller.worker_group import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup

_EXPORTS = {
    "colocated": ("ColocatedWorker", "create_colocated_worker_cls"),
    "dispatch": (
        "Dispatch",
        "Execute",
        "make_nd_compute_dataproto_dispatch_fn",
        "register",
        "register_dispatch_mode",
    ),
    "futures": ("Future", "FutureList", "HangError", "RestartError", "WorkerDiedError"),
    "local": ("LOCAL", "LocalWorkerGroup"),
    "placement": ("ResourcePoolManager", "Role"),
    "ray_backend": ("RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "make_ray_backend"),
    "worker": ("Place", "Worker", "worker_place"),
    "worker_group": ("Backend", "ClassWithInitArgs", "ResourcePool", "WorkerGroup"),
}
"""Module -> its public names. Names are imported on first use, since driving a cluster needs no torch."""

__all__ = [
    "LOCAL",
    "Backend",
    "ClassWithInitArgs",
    "ColocatedWorker",
    "Dispatch",
    "Execute",
    "Future",
    "FutureList",
    "HangError",
    "LocalWorkerGroup",
    "Place",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "RestartError",
    "Role",
    "Worker",
    "WorkerDiedError",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_ray_backend",
    "register",
    "register_dispatch_mode",
    "worker_place",
]


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
