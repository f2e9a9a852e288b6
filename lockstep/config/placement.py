"""Which roles a run needs, and the pools of worker processes they run in.

trainer.placement   pools
colocate            global_pool: everything
hybrid              actor_pool: actor, rollout, ref        critic_pool: critic, rm
split               actor_pool: actor, ref                 critic_pool: critic, rm      rollout_pool: rollout
standalone          one pool per role

The pools of a named placement split the workers of `trainer.nnodes` machines with `trainer.n_gpus_per_node` each: by machine if
there are enough machines, otherwise within every machine. `resource_pool_spec` and `resource_pool_mapping` define pools
explicitly instead.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from lockstep.config.estimators import needs_values
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
    """A named placement has more pools than there are workers; `reason` says how many it needs."""

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


def is_trained(config: PPOConfig) -> bool:
    """Whether the policy changes."""
    return not config.trainer.val_only and config.actor_rollout_ref.actor.optim.lr > 0


def need_critic(config: PPOConfig) -> bool:
    if config.trainer.val_only:
        return False
    if config.critic.enable is not None:
        return config.critic.enable
    return needs_values(config.algorithm.adv_estimator)


def need_reference_policy(config: PPOConfig) -> bool:
    uses_kl = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    return uses_kl and not config.trainer.val_only


def need_reference_model(config: PPOConfig) -> bool:
    """Whether the reference policy has a model of its own: with LoRA it is the actor with its adapters off."""
    return need_reference_policy(config) and not config.actor_rollout_ref.model.lora_rank


def need_reward_model(config: PPOConfig) -> bool:
    return config.reward_model.enable


def needed_models(config: PPOConfig) -> list[str]:
    """The roles besides the policy: any of ref, critic and rm."""
    needed = {"ref": need_reference_model(config), "critic": need_critic(config), "rm": need_reward_model(config)}
    return [role for role, is_needed in needed.items() if is_needed]


def controller_of(config: PPOConfig) -> Literal["local", "ray"]:
    """auto is local for a single worker, which then runs in the controller's process."""
    if config.trainer.controller != "auto":
        return config.trainer.controller
    return "local" if num_workers(config) == 1 else "ray"


def machines_of(config: PPOConfig) -> list[int]:
    """Worker processes per machine (or part of one) over all pools."""
    if config.resource_pool_spec:
        return [count for pool in config.resource_pool_spec.values() for count in pool]
    trainer, reward = config.trainer, config.reward_model
    own_pool = [reward.n_gpus_per_node] * reward.nnodes if reward.enable and reward.enable_resource_pool else []
    return [trainer.n_gpus_per_node] * trainer.nnodes + own_pool


def num_workers(config: PPOConfig) -> int:
    """Number of worker processes of all pools."""
    return sum(machines_of(config))


def pools_of(config: PPOConfig, models: Collection[str]) -> Pools:
    """The pools that have a role. models: the roles besides the policy (see `needed_models`)."""
    pools = _explicit(config, models) if config.resource_pool_spec else _named(config, models)
    used = set(pools.role_pools.values())
    return Pools({name: machines for name, machines in pools.spec.items() if name in used}, pools.role_pools)


def _named(config: PPOConfig, models: Collection[str]) -> Pools:
    trainer, reward = config.trainer, config.reward_model
    present = {"actor_rollout", "actor", "rollout", *models}
    separate = {"rm"} if reward.enable_resource_pool else set()
    parts = {pool: [r for r in roles if r in present - separate] for pool, roles in POOLS[trainer.placement].items()}
    parts = {pool: roles for pool, roles in parts.items() if roles}
    spec = dict(zip(parts, _split_workers(trainer.nnodes, trainer.n_gpus_per_node, len(parts))))
    if not all(spec.values()):
        raise TooFewWorkers(
            trainer.placement,
            f"has {len(parts)} pools ({', '.join(parts)}), more than there are machines (trainer.nnodes={trainer.nnodes}) or "
            f"workers per machine (trainer.n_gpus_per_node={trainer.n_gpus_per_node}); set either to {len(parts)} or more",
        )
    role_pools = {role: pool for pool, roles in parts.items() for role in roles}
    if "rm" in models and reward.enable_resource_pool:
        spec["reward_pool"] = [reward.n_gpus_per_node] * reward.nnodes
        role_pools["rm"] = "reward_pool"
    return Pools(spec, role_pools)


def _split_workers(num_machines: int, per_machine: int, num_pools: int) -> list[list[int]]:
    """Processes per machine of each pool; the first pools get the remainder."""
    if num_machines >= num_pools:
        base, remainder = divmod(num_machines, num_pools)
        return [[per_machine] * (base + (i < remainder)) for i in range(num_pools)]
    base, remainder = divmod(per_machine, num_pools)
    counts = [base + (i < remainder) for i in range(num_pools)]
    return [[count] * num_machines if count else [] for count in counts]


def _explicit(config: PPOConfig, models: Collection[str]) -> Pools:
    spec, mapping = config.resource_pool_spec, config.resource_pool_mapping
    default = "global_pool" if "global_pool" in spec else next(iter(spec))
    fallback = dict.fromkeys(ROLES, default) | {"rm": "reward_pool" if "reward_pool" in spec else default}
    chosen = {role: mapping.get(role, fallback[role]) for role in models}
    if "actor" in mapping or "rollout" in mapping:
        chosen |= {role: mapping.get(role, mapping.get("actor_rollout", default)) for role in ("actor", "rollout")}
    if chosen.get("actor") == chosen.get("rollout"):  # neither is mapped, or both run in the same pool
        pool = chosen.pop("actor", mapping.get("actor_rollout", default))
        chosen.pop("rollout", None)
        chosen["actor_rollout"] = pool
    return Pools({name: list(machines) for name, machines in spec.items()}, chosen)
