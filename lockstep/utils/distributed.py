"""The process group that all roles of a process share, and meshes over its ranks.

MASTER_ADDR and MASTER_PORT come from the environment, rank and world size from the caller. On CUDA a group has two backends,
so that host tensors are exchanged without synchronising with the device: gloo for the host and NCCL for the device, or gloo for
both if ranks share a GPU, which NCCL refuses.
"""

import atexit
import logging
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

logger = logging.getLogger(__name__)
T = TypeVar("T")

_OWN_GPU, _SHARED_GPU = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"


def join_process_group(rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Join the group of all `world_size` processes; no-op for a single process or if it has already joined.

    timeout_s: how long a rank waits for the others, here and in every collective.
    """
    if world_size == 1:
        return
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RuntimeError(
                f"rank {rank} of {world_size} cannot join: this process is already rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, and roles that share a process share its process group"
            )
        return
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        backends = _OWN_GPU
        if _shares_gpu(store, device, world_size):
            backends = _SHARED_GPU
            if rank == 0:
                logger.warning("several ranks share a GPU: they exchange data through gloo, which is slow")
        dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    atexit.register(leave_process_group)


def init_single_process_group(device: torch.device) -> None:
    """Create a group of this process alone if it has none, so that meshes also work at world size 1."""
    if not dist.is_initialized():
        backends = _OWN_GPU if device.type == "cuda" else "gloo"
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave_process_group)


def leave_process_group() -> None:
    if dist.is_initialized():
        _mesh.cache_clear()
        dist.destroy_process_group()


def current_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def current_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def least_of_ranks(number: int) -> int:
    """The smallest `number` of all ranks; collective."""
    if current_world_size() == 1:
        return number
    least = torch.tensor(number)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def summed_over_ranks(*values: float) -> tuple[float, ...]:
    """Each value summed over all ranks; collective."""
    if current_world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return tuple(total.tolist())


def merged_over_ranks(entries: Mapping[str, str]) -> dict[str, str]:
    """The entries of all ranks, those of the lowest rank where several have one; collective."""
    if least_of_ranks(int(not entries)):
        return {}
    everyones: list[Any] = [dict(entries)] * current_world_size()
    if len(everyones) > 1:
        dist.all_gather_object(everyones, dict(entries))
    return {name: text for own in reversed(everyones) for name, text in own.items()}


def wait_for_all_ranks() -> None:
    least_of_ranks(0)


def on_first_rank(call: Callable[[], T]) -> T:
    """The result of `call()` on rank 0, on every rank; its error is raised on every rank too. Collective."""
    if current_world_size() == 1:
        return call()
    outcome: list[object] = [None, None]
    if current_rank() == 0:
        try:
            outcome[0] = call()
        except Exception as error:  # noqa: BLE001 - raised again below, on all ranks
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[1], Exception):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]


def join_group(name: str, address: str, port: int, rank: int, size: int, backend: str, timeout_s: float) -> Any:
    """Join a process group in addition to the default one, with processes that have other default groups; rank 0 opens the port.

    Made in the way of SGLang, so that both sides find the same keys in the store.
    """
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    prefixed = dist.PrefixStore(name, store)
    group_name = cast(Any, name)
    group, _ = _new_process_group_helper(
        size, rank, [], dist.Backend(backend), prefixed, group_name=group_name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {place: place for place in range(size)}
    return group


def get_mesh(device: torch.device, dimensions: Mapping[str, int]) -> DeviceMesh:
    """All ranks as a grid. dimensions: name -> size, outermost first; ranks that follow each other are in the last one.

    The same mesh for the same dimensions: its groups are created once.
    """
    return _mesh(device.type, dist.get_world_size(), tuple(dimensions.items()))


@cache
def _mesh(device_type: str, world_size: int, dimensions: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*dimensions)
    if math.prod(sizes) != world_size:
        raise ValueError(f"a mesh of {dict(dimensions)} has {math.prod(sizes)} ranks, but there are {world_size}")
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def _shares_gpu(store: Any, device: torch.device, world_size: int) -> bool:
    """Whether any two of the ranks have the same GPU. Collective, before there is a group."""
    if store.add(f"gpu/{torch.cuda.get_device_properties(device).uuid}", 1) > 1:
        store.set("gpu/shared", "")
    if store.add("gpu/ranks", 1) == world_size:
        store.set("gpu/all", "")
    store.wait(["gpu/all"])
    return bool(store.check(["gpu/shared"]))
