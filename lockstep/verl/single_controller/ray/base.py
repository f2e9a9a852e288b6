"""verl.single_controller.ray.base: worker groups on Ray."""

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.single_controller import ResourcePoolManager, create_colocated_worker_cls
from lockstep.single_controller import ray_backend as backend
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
__getattr__ = exports(__name__)


class RayClassWithInitArgs(backend.RayClassWithInitArgs):
    """A worker class, which may be wrapped by `ray.remote`, and its arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(unwrapped(cls), *args, **kwargs)


class RayWorkerGroup(backend.RayWorkerGroup):
    """A worker group with verl's arguments and method names.

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
        per_machine = set(resource_pool.store)
        env = {"RAY_LOCAL_WORLD_SIZE": str(per_machine.pop())} if len(per_machine) == 1 else {}
        ray_cls_with_init.update_options({"runtime_env": {"env_vars": env | dict(worker_env or {})}})
        super().__init__(resource_pool, ray_cls_with_init, name_prefix=name_prefix, detached=detached)

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_all_async(method_name, *args, **kwargs)

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, Any]:
        return dict(self.spawn(prefix_set))

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the group of each role an attribute: `group.actor.update(...)`."""
        for role, group in self.spawn(prefix_set).items():
            setattr(self, role, group)
