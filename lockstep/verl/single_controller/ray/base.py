"""verl.single_controller.ray.base: worker groups on Ray.

Groups of Lockstep's own worker classes that a program builds (`RayClassWithInitArgs(ActorRolloutRefWorker, config=config, ...)`)
get typed sections of the config, and take and return whole batches (`lockstep.verl._whole_batches`).
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self
from weakref import WeakKeyDictionary

from lockstep.protocol import DataProto
from lockstep.single_controller import (
    ResourcePool,
    create_colocated_worker_cls as create_colocated_worker_cls,
    ray_backend as backend,
)
from lockstep.single_controller.dispatch import Registration
from lockstep.single_controller.futures import FutureList
from lockstep.single_controller.ray_backend import RayResourcePool as RayResourcePool
from lockstep.single_controller.worker_group import ClassWithInitArgs
from lockstep.verl._config import typed_section
from lockstep.verl._names import exports
from lockstep.verl._ray import unwrapped
from lockstep.verl._whole_batches import ADAPTED, ByHand, WholeBatchGroup
from lockstep.verl.protocol import adopt
from lockstep.verl.single_controller.pools import ResourcePoolManager as ResourcePoolManager, ray_pool
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.critic import CriticWorker
from lockstep.workers.reward_model import RewardModelWorker

create_colocated_worker_cls_fused = create_colocated_worker_cls
__getattr__ = exports(
    __name__, {"lockstep.verl.single_controller.ray.pools": ("merge_resource_pool", "split_resource_pool")}
)

SET_BY_GROUP = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WG_PREFIX", "WG_BACKEND")
"""Environment variables of workers that a group sets itself."""


SECTIONS = {
    ActorRolloutRefWorker: "actor_rollout_ref",
    CriticWorker: "critic",
    RewardModelWorker: "reward_model",
}
"""Lockstep's worker classes and the section of the config that each takes."""


def _section_of(cls: type) -> str | None:
    return next((section for own, section in SECTIONS.items() if issubclass(cls, own)), None)


_ray_pools: WeakKeyDictionary[ResourcePool, RayResourcePool] = WeakKeyDictionary()
"""The reservation of each pool of processes that was not made for Ray."""


def _as_ray_pool(pool: ResourcePool) -> RayResourcePool:
    if isinstance(pool, RayResourcePool):
        return pool
    if pool not in _ray_pools:
        count, name = pool.max_colocate_count, pool.name_prefix
        _ray_pools[pool] = ray_pool(process_on_nodes=pool.store, max_colocate_count=count, name_prefix=name)
    return _ray_pools[pool]


class CopyingWorkerGroup(backend.RayWorkerGroup):
    """Workers get copies of their argument batches, which they may write into."""

    _host_method = "call_on_copies"


class RayClassWithInitArgs(backend.RayClassWithInitArgs):
    """A worker class, which may be wrapped by `ray.remote`, and its arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        cls = unwrapped(cls)
        if (section := _section_of(cls)) is not None:
            if args:
                args = (typed_section(args[0], section), *args[1:])
            elif "config" in kwargs:
                kwargs["config"] = typed_section(kwargs["config"], section)
        super().__init__(cls, *args, **kwargs)


class RayWorkerGroup(CopyingWorkerGroup):
    """A worker group with verl's arguments and method names; non-blocking calls return Ray's references.

    resource_pool: on Ray, or any other, for which processes are reserved then.
    worker_env:    environment variables of the worker processes.
    """

    _parent: "RayWorkerGroup | None" = None

    def __init__(
        self,
        resource_pool: ResourcePool,
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
        pool = _as_ray_pool(resource_pool)
        roles: Mapping[str, ClassWithInitArgs] = getattr(ray_cls_with_init.cls, "roles", {"": ray_cls_with_init})
        for own in roles.values():
            if _section_of(own.cls) is not None:
                own.kwargs.setdefault("device", "cuda" if pool.use_gpu else "cpu")
        super().__init__(pool, ray_cls_with_init, name_prefix=name_prefix, detached=detached)

    @property
    def whole(self) -> "RayWorkerGroup":
        """The group that this one was spawned from, or itself."""
        return self._parent or self

    @property
    def has_reference(self) -> bool:
        """Whether workers of a policy have its reference too."""
        return self._role == "actor_rollout_ref"

    @property
    def _role(self) -> str:
        args = self.cls_with_init.args
        return str(args[1] if len(args) > 1 else self.cls_with_init.kwargs.get("role", ""))

    def plain(self) -> CopyingWorkerGroup:
        """The same workers with Lockstep's own methods."""
        group = object.__new__(CopyingWorkerGroup)
        group._set_up(self.resource_pool, self.cls_with_init, self.name, self._method_prefix)
        group._processes, group.workers = self._processes, self.workers
        return group

    @functools.cached_property
    def _whole_batches(self) -> WholeBatchGroup:
        args, kwargs = self.cls_with_init.args, self.cls_with_init.kwargs
        return WholeBatchGroup(self.plain(), ByHand(args[0] if args else kwargs["config"], self._role))

    def _set_up(
        self, resource_pool: ResourcePool, cls_with_init: ClassWithInitArgs, name: str | None, method_prefix: str = ""
    ) -> None:
        super()._set_up(resource_pool, cls_with_init, name, method_prefix)
        if issubclass(cls_with_init.cls, RewardModelWorker):
            self.compute_scores = self.compute_rm_score

    def _bind(self, method_name: str, registration: Registration) -> Callable[..., Any]:
        call = super()._bind(method_name, registration)
        adapts = method_name in ADAPTED and _section_of(self.cls_with_init.cls) is not None

        @functools.wraps(call)
        def call_for_references(*args: Any, **kwargs: Any) -> Any:
            if adapts:
                return getattr(self._whole_batches, method_name)(*args, **kwargs)
            return _references(call(*args, **kwargs))

        return call_for_references

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        groups = super().spawn(prefix_set)
        for group in groups.values():
            group._parent = self
        return groups

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
    if isinstance(output, DataProto):
        return adopt(output)
    return output.ref if isinstance(output, backend.RayFuture) else output
