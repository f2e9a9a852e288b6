"""The process group that all roles of a process share, and meshes over its ranks.

MASTER_ADDR and MASTER_PORT stand in the environment; rank and world size come from whoever placed the process. On CUDA a group
has two backends, so that numbers on the host are exchanged without waiting for the device.
"""

import atexit
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def join_process_group(rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Join the group of all `world_size` processes, to be left at exit; a process that is alone or has joined has nothing to do.

    timeout_s: how long a rank waits for the others, here and in every collective.
    """
    if world_size == 1:
        return
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RuntimeError(
                f"rank {rank} of {world_size} cannot join: this process is rank {dist.get_rank()} of "
                f"{dist.get_world_size()} already, and roles that share a process share its process group"
            )
        return
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(_backends(device), rank=rank, world_size=world_size, timeout=timeout)
    atexit.register(leave_process_group)


def found_lone_group(device: torch.device) -> None:
    """A group of this process alone, where it has none: what is built on meshes then works at world size 1 too."""
    if not dist.is_initialized():
        dist.init_process_group(_backends(device), store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave_process_group)


def leave_process_group() -> None:
    if dist.is_initialized():
        _mesh.cache_clear()
        dist.destroy_process_group()


def current_rank() -> int:
    """This process's rank, 0 where it has joined no group."""
    return dist.get_rank() if dist.is_initialized() else 0


def current_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mesh_of(device: torch.device, size: int) -> DeviceMesh:
    """All ranks, in groups of `size` that follow each other: dimension `inner`; ranks of equal place in them: `outer`.

    Where one group holds all ranks, the mesh has the dimension `inner` alone.
    """
    return _mesh(device.type, dist.get_world_size(), size)


@cache
def _mesh(device_type: str, world_size: int, size: int) -> DeviceMesh:
    if size == world_size:
        return init_device_mesh(device_type, (size,), mesh_dim_names=("inner",))
    return init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("outer", "inner"))


def _backends(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
