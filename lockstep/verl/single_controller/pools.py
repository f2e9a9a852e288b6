"""Resource pools on Ray, as programs on verl build them; Ray is imported on first use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.single_controller import placement
from lockstep.single_controller.worker_group import ResourcePool

if TYPE_CHECKING:
    from lockstep.single_controller.ray_backend import RayResourcePool


def ray_pool(**options: Any) -> "RayResourcePool":
    """A pool on the cluster that this program is connected to, with a GPU per process if the cluster has GPUs.

    A cluster is started on this machine if there is none.
    """
    from lockstep.single_controller.ray_backend import RayResourcePool, connect, has_gpus

    connect(min_cpus=sum(options["process_on_nodes"]))
    return RayResourcePool(use_gpu=has_gpus(), **options)


@dataclass
class ResourcePoolManager(placement.ResourcePoolManager):
    """Builds pools on Ray; a trainer without Ray replaces the class of the pools."""

    pool_class: Callable[..., ResourcePool] = ray_pool
