"""One controller program that calls groups of workers as if they were one object. Knows nothing of RL.

dispatch.py      modes, `@register`: how arguments are split and outputs joined
worker.py        Worker: the base of every worker class
worker_group.py  WorkerGroup: call → dispatch → execute → collect
local.py         the backend in this process
ray_backend/     the backend of processes on a Ray cluster; imported, and Ray with it, when first asked for
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
    from lockstep.single_controller.futures import Future, FutureList, WorkerDiedError
    from lockstep.single_controller.local import LOCAL, LocalWorkerGroup
    from lockstep.single_controller.placement import ResourcePoolManager, Role
    from lockstep.single_controller.ray_backend import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        make_ray_backend,
    )
    from lockstep.single_controller.worker import Place, Worker, placed_at
    from lockstep.single_controller.worker_group import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup

_HOMES = {
    "colocated": ("ColocatedWorker", "create_colocated_worker_cls"),
    "dispatch": (
        "Dispatch",
        "Execute",
        "make_nd_compute_dataproto_dispatch_fn",
        "register",
        "register_dispatch_mode",
    ),
    "futures": ("Future", "FutureList", "WorkerDiedError"),
    "local": ("LOCAL", "LocalWorkerGroup"),
    "placement": ("ResourcePoolManager", "Role"),
    "ray_backend": ("RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "make_ray_backend"),
    "worker": ("Place", "Worker", "placed_at"),
    "worker_group": ("Backend", "ClassWithInitArgs", "ResourcePool", "WorkerGroup"),
}
"""Module to the names it has. A name is imported when first asked for: what drives a cluster needs no torch."""

__all__ = [
    "LOCAL",
    "Backend",
    "ClassWithInitArgs",
    "ColocatedWorker",
    "Dispatch",
    "Execute",
    "Future",
    "FutureList",
    "LocalWorkerGroup",
    "Place",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "WorkerDiedError",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_ray_backend",
    "placed_at",
    "register",
    "register_dispatch_mode",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
