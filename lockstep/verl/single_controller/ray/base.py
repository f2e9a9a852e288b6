"""verl.single_controller.ray.base: worker groups on Ray."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.single_controller import ResourcePoolManager, create_colocated_worker_cls
from lockstep.single_controller import ray_backend as backend
from lockstep.single_controller.dispatch import Registration
from lockstep.single_controller.futures import FutureList
from lockstep.single_controller.ray_backend import RayResourcePool
from lockstep.verl._names import exports
from lockstep.verl._ray import unwrapped

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
]

create_colocated_worker_cls_fused = create_colocated_worker_cls
__getattr__ = exports(
    __name__, {"lockstep.verl.single_controller.ray.pools": ("merge_resource_pool", "split_resource_pool")}
)

SET_BY_GROUP = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WG_PREFIX", "WG_BACKEND")
"""Environment variables of workers that a group sets itself."""


class CopyingWorkerGroup(backend.RayWorkerGroup):
    """Workers get copies of their argument batches, which they may write into."""

    _host_method = "call_on_copies"


class RayClassWithInitArgs(backend.RayClassWithInitArgs):
    """A worker class, which may be wrapped by `ray.remote`, and its arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(unwrapped(cls), *args, **kwargs)


class RayWorkerGroup(CopyingWorkerGroup):
    """A worker group with verl's arguments and method names; non-blocking calls return Ray's references.

    worker_env: environment variables of the worker processes.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: backend.RayClassWithInitArgs,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        if taken := sorted(set(worker_env or {}) & set(SET_BY_GROUP)):
            raise ValueError(f"worker_env may not set {', '.join(taken)}: the worker group does")
        per_machine = set(resource_pool.store)
        env = {"RAY_LOCAL_WORLD_SIZE": str(per_machine.pop())} if len(per_machine) == 1 else {}
        ray_cls_with_init.update_options({"runtime_env": {"env_vars": env | dict(worker_env or {})}})
        super().__init__(resource_pool, ray_cls_with_init, name_prefix=name_prefix, detached=detached)

    def _bind(self, method_name: str, registration: Registration) -> Callable[..., Any]:
        call = super()._bind(method_name, registration)

        @functools.wraps(call)
        def call_for_references(*args: Any, **kwargs: Any) -> Any:
            return _references(call(*args, **kwargs))

        return call_for_references

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return super().execute_rank_zero_async(method_name, *args, **kwargs).ref

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return super().execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return _references(self._execute_all(method_name, args, kwargs))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._execute_all(method_name, args, kwargs).get()

    execute_rank_zero, execute_all = execute_rank_zero_async, execute_all_async

    def _execute_all(self, method_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FutureList:
        """Each rank gets its item if all arguments are lists with one item per rank, otherwise the same arguments."""
        lists = [*args, *kwargs.values()]
        if not lists or not all(isinstance(items, list) and len(items) == self.world_size for items in lists):
            return super().execute_all_async(method_name, *args, **kwargs)
        return FutureList(
            self._call(
                rank,
                self._method_prefix + method_name,
                [items[rank] for items in args],
                {name: items[rank] for name, items in kwargs.items()},
            )
            for rank in range(self.world_size)
        )

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, Any]:
        return dict(self.spawn(prefix_set))

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the group of each role an attribute: `group.actor.update(...)`."""
        for role, group in self.spawn(prefix_set).items():
            setattr(self, role, group)


def _references(output: Any) -> Any:
    if isinstance(output, FutureList):
        return [_references(future) for future in output]
    return output.ref if isinstance(output, backend.RayFuture) else output
