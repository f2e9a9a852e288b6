"""Which role runs on which resource pool."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.registry import did_you_mean
from lockstep.single_controller.worker_group import ResourcePool


class Role(StrEnum):
    """The roles of a worker group; `str(role)` is its name in configs, metrics and messages."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"


@dataclass
class ResourcePoolManager:
    """Builds the resource pools and maps roles to them.

    resource_pool_spec: processes per machine of each pool, {"global_pool": [8, 8]}.
    mapping:            the pool of each role; roles with the same pool share its processes.
    pool_class:         the pool class of the backend.
    resource_pool_dict: the pools, after `create_resource_pool`.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    pool_class: Callable[..., ResourcePool] = ResourcePool
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ValueError(
                    f"role {role} is mapped to an unknown pool {pool!r}. {did_you_mean(pool, self.resource_pool_spec)}"
                )
        for pool, process_on_nodes in self.resource_pool_spec.items():
            if not process_on_nodes:
                raise ValueError(
                    f"resource pool {pool!r} has no machines; list its processes per machine, for example [8, 8]"
                )

    def create_resource_pool(self) -> None:
        """Build every pool of the spec."""
        for pool, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[pool] = self.pool_class(
                process_on_nodes=process_on_nodes, max_colocate_count=max(1, len(self.mapping)), name_prefix=pool
            )

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool that `role` runs on."""
        if role not in self.mapping:
            raise ValueError(f"role {role} has no resource pool. {did_you_mean(role, self.mapping)}")
        if self.mapping[role] not in self.resource_pool_dict:
            raise ValueError(f"resource pool {self.mapping[role]!r} is not built; call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def shutdown(self) -> None:
        """Release all pools."""
        for pool in self.resource_pool_dict.values():
            pool.shutdown()

    def get_n_gpus(self) -> int:
        """Total number of processes in all pools."""
        return sum(sum(process_on_nodes) for process_on_nodes in self.resource_pool_spec.values())
