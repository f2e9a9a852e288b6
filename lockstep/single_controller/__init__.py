"""One controller program that calls groups of workers as if they were one object. Knows nothing of RL.

dispatch.py      modes, `@register`: how arguments are split and outputs joined
worker.py        Worker: the base of every worker class
worker_group.py  WorkerGroup: call → dispatch → execute → collect
local.py         the backend in this process
colocated.py     several roles in one process
placement.py     roles to resource pools
"""

from lockstep.single_controller.colocated import ColocatedWorker, create_colocated_worker_cls
from lockstep.single_controller.dispatch import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from lockstep.single_controller.futures import Future, FutureList
from lockstep.single_controller.local import LOCAL, LocalWorkerGroup
from lockstep.single_controller.placement import ResourcePoolManager, Role
from lockstep.single_controller.worker import Place, Worker, placed_at
from lockstep.single_controller.worker_group import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup

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
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "placed_at",
    "register",
    "register_dispatch_mode",
]
