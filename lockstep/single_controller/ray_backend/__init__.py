"""The Ray backend: each worker is an actor, a process of its own on a machine of the cluster.

cluster.py  joining or starting Ray, what the machines have
pool.py     RayResourcePool: placement groups
host.py     WorkerHost: what runs in each process
group.py    RayWorkerGroup: starts the processes and calls them
futures.py  RayFuture, and how failures reach the caller
wire.py     DataProto in the object store

A worker method reads the batches of its arguments where they lie in the object store: to write into a tensor in place it
clones it first; forgetting that is an error by name. With GPUs each process sees its own one, as cuda:0,
and its LOCAL_RANK is 0.
"""

from lockstep.single_controller.ray_backend.cluster import connect, disconnect, has_gpus
from lockstep.single_controller.ray_backend.futures import RayFuture, WorkerError
from lockstep.single_controller.ray_backend.group import RayClassWithInitArgs, RayWorkerGroup, make_ray_backend
from lockstep.single_controller.ray_backend.pool import RayResourcePool

__all__ = [
    "RayClassWithInitArgs",
    "RayFuture",
    "RayResourcePool",
    "RayWorkerGroup",
    "WorkerError",
    "connect",
    "disconnect",
    "has_gpus",
    "make_ray_backend",
]
