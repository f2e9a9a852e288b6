"""Which worker processes there are and which roles run in them: pools of processes, and the pool of each role.

trainer.placement   pools
colocate            global_pool: everything
hybrid              actor_pool: actor, rollout, ref        critic_pool: critic, rm
split               actor_pool: actor, ref                 critic_pool: critic, rm      rollout_pool: rollout
standalone          a pool for each role

The pools of a named placement share out the workers of `trainer.nnodes` machines with `trainer.n_gpus_per_node` each: whole
machines where there are enough, parts of every machine otherwise. `resource_pool_spec` and `resource_pool_mapping` say it
in full instead.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from lockstep.config.ppo import PPOConfig

POOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "colocate": {"global_pool": ("actor_rollout", "ref", "critic", "rm")},
    "hybrid": {"actor_pool": ("actor_rollout", "ref"), "critic_pool": ("critic", "rm")},
    "split": {"actor_pool": ("actor", "ref"), "critic_pool": ("critic", "rm"), "rollout_pool": ("rollout",)},
    "standalone": {f"{role}_pool": (role,) for role in ("actor", "rollout", "critic", "ref", "rm")},
}
"""Named placements: pool to its roles."""

ROLES = ("actor_rollout", "actor", "rollout", "ref", "critic", "rm")


class TooFewWorkers(ValueError):
    """A named placement has more pools than the workers can be shared out to; `reason` says what it needs."""

    def __init__(self, placement: str, reason: str) -> None:
        super().__init__(f"trainer.placement={placement}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Pools:
    """spec: pool to its processes per machine; role_pools: role to its pool."""

    spec: dict[str, list[int]]
    role_pools: dict[str, str]

    def world_size(self, role: str) -> int:
        return sum(self.spec[self.role_pools[role]])


def controller_of(config: PPOConfig) -> Literal["local", "ray"]:
    """auto is local where there is one worker, which then runs in the controller's process."""
    if config.trainer.controller != "auto":
        return config.trainer.controller
    return "local" if num_workers(config) == 1 else "ray"


def machines_of(config: PPOConfig) -> list[int]:
    """Worker processes of each machine, or part of one, that the pools ask for."""
    if config.resource_pool_spec:
        return [count for pool in config.resource_pool_spec.values() for count in pool]
    trainer, reward = config.trainer, config.reward_model
    own_pool = [reward.n_gpus_per_node] * reward.nnodes if reward.enable and reward.enable_resource_pool else []
    return [trainer.n_gpus_per_node] * trainer.nnodes + own_pool


def num_workers(config: PPOConfig) -> int:
    """Worker processes of all pools."""
    return sum(machines_of(config))


def pools_of(config: PPOConfig, models: Collection[str]) -> Pools:
    """The pools of a run that have a role. models: what it has beside the policy, of ref, critic and rm."""
    pools = _explicit(config, models) if config.resource_pool_spec else _named(config, models)
    used = set(pools.role_pools.values())
    return Pools({name: machines for name, machines in pools.spec.items() if name in used}, pools.role_pools)


def _named(config: PPOConfig, models: Collection[str]) -> Pools:
    trainer, reward = config.trainer, config.reward_model
    wanted = {"actor_rollout", "actor", "rollout", *models}
    separate = {"rm"} if reward.enable_resource_pool else set()
    parts = {pool: [r for r in roles if r in wanted - separate] for pool, roles in POOLS[trainer.placement].items()}
    parts = {pool: roles for pool, roles in parts.items() if roles}
    spec = dict(zip(parts, _share_out(trainer.nnodes, trainer.n_gpus_per_node, len(parts))))
    if not all(spec.values()):
        raise TooFewWorkers(
            trainer.placement,
            f"has {len(parts)} pools ({', '.join(parts)}), more than there are machines (trainer.nnodes={trainer.nnodes}) or "
            f"workers on each (trainer.n_gpus_per_node={trainer.n_gpus_per_node}); set one of the two to {len(parts)} or more",
        )
    role_pools = {role: pool for pool, roles in parts.items() for role in roles}
    if "rm" in models and reward.enable_resource_pool:
        spec["reward_pool"] = [reward.n_gpus_per_node] * reward.nnodes
        role_pools["rm"] = "reward_pool"
    return Pools(spec, role_pools)


def _share_out(num_machines: int, per_machine: int, num_pools: int) -> list[list[int]]:
    """Processes per machine of each pool; the first pools get what does not divide."""
    if num_machines >= num_pools:
        base, more = divmod(num_machines, num_pools)
        return [[per_machine] * (base + (i < more)) for i in range(num_pools)]
    base, more = divmod(per_machine, num_pools)
    counts = [base + (i < more) for i in range(num_pools)]
    return [[count] * num_machines if count else [] for count in counts]


def _explicit(config: PPOConfig, models: Collection[str]) -> Pools:
    spec, mapping = config.resource_pool_spec, config.resource_pool_mapping
    default = "global_pool" if "global_pool" in spec else next(iter(spec))
    fallback = dict.fromkeys(ROLES, default) | {"rm": "reward_pool" if "reward_pool" in spec else default}
    chosen = {role: mapping.get(role, fallback[role]) for role in models}
    if "actor" in mapping or "rollout" in mapping:
        chosen |= {role: mapping.get(role, mapping.get("actor_rollout", default)) for role in ("actor", "rollout")}
    if chosen.get("actor") == chosen.get("rollout"):  # neither is named, or both run in the same processes
        pool = chosen.pop("actor", mapping.get("actor_rollout", default))
        chosen.pop("rollout", None)
        chosen["actor_rollout"] = pool
    return Pools({name: list(machines) for name, machines in spec.items()}, chosen)
