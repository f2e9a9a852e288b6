"""Parts of a resource pool, and two pools as one. Ranks are those of consecutive processes.

A pool reserves its machines when the first worker group starts on it, so pools are split and merged before that.
"""

from collections.abc import Sequence

from lockstep.single_controller.ray_backend import RayResourcePool


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Pools of `split_size` processes each, or one pool per size; the sizes must add up to the pool."""
    _require_free(resource_pool)
    total = resource_pool.world_size
    sizes = [split_size] * (total // split_size) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != total or min(sizes, default=0) < 1:
        raise AssertionError(f"split_resource_pool: {split_size} does not divide a pool of {total} processes")
    machine_of = [machine for machine, count in enumerate(resource_pool.store) for _ in range(count)]
    parts, start = [], 0
    for number, size in enumerate(sizes):
        machines = machine_of[start : start + size]
        counts = [machines.count(machine) for machine in sorted(set(machines))]
        parts.append(_like(resource_pool, counts, f"{resource_pool.name_prefix}_part{number}"))
        start += size
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """A pool with the processes of both."""
    for pool in (rp1, rp2):
        _require_free(pool)
    if (rp1.use_gpu, rp1.max_colocate_count, rp1.detached) != (rp2.use_gpu, rp2.max_colocate_count, rp2.detached):
        raise AssertionError("merge_resource_pool: the pools differ in use_gpu, max_colocate_count or detached")
    return _like(rp1, [*rp1.store, *rp2.store], f"{rp1.name_prefix}_{rp2.name_prefix}")


def _require_free(pool: RayResourcePool) -> None:
    if pool._placement_groups:
        raise ValueError(f"resource pool {pool.name_prefix!r} has started workers; split or merge it before")


def _like(pool: RayResourcePool, counts: Sequence[int], name: str) -> RayResourcePool:
    return RayResourcePool(
        counts,
        use_gpu=pool.use_gpu,
        name_prefix=name,
        max_colocate_count=pool.max_colocate_count,
        detached=pool.detached,
        n_gpus_per_node=pool.n_gpus_per_node,
    )
