"""Find the placement, pool sizes, parallel sizes, token budgets and offload of a run: the mapping search of HybridFlow.

    roles ─► set partitions into pools ─► GPUs of each pool ─► best settings of each pool ─► stages of the dataflow ─► fastest

The settings of a pool depend only on its roles and its GPUs, so that each such pair is planned once. Memory and time are those of
`lockstep plan`. What changes results (batch sizes, dtypes, lengths) is left as it is.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, Literal

from lockstep.config.micro_batches import RL
from lockstep.config.placement import POOLS, ROLES, TooFewWorkers, needed_models, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import sections_of
from lockstep.config.schema import defaults, get_in, to_plain, with_values
from lockstep.plan.adapters import adapters_of
from lockstep.plan.batch_units import Lengths
from lockstep.plan.dataflow import busy_time, slowest_pool
from lockstep.plan.estimate import longest_lengths, model_shape
from lockstep.plan.hardware import Device
from lockstep.plan.job import Job, Model, job_of
from lockstep.plan.memory import RESERVED, missing_cache, phases
from lockstep.plan.step_time import step_times, transfer_time

TOKEN_BUDGETS = (8192, 16384, 32768)
UTILIZATIONS = (0.7, 0.85)
"""Tried besides the configured `rollout.gpu_memory_utilization`, if larger."""
MOST_MEMORY = 0.95
"""Share of the device's memory that a candidate may need."""
Offloaded = Literal["none", "frozen", "all"]
OFFLOAD: tuple[tuple[Offloaded, bool], ...] = (
    *(("none", False), ("frozen", False), ("none", True), ("frozen", True)),
    ("all", True),
)
"""(models whose parameters are offloaded, whether the optimizer is), in the order of preference."""
FROZEN = {"ref", "rm"}
"""Roles that are not trained."""

_POOL_NAMES = {"actor_rollout": "actor_pool", "rm": "reward_pool"}

Roles = frozenset[str]


@dataclass(frozen=True)
class Settings:
    """What the search varies for all roles of a pool.

    shards:           ranks that hold one copy of a model; -1 for all.
    param_offload:    models whose parameters are offloaded; frozen: only those that are not trained.
    max_tokens:       of a micro-batch on one GPU.
    utilization:      share of the memory for the rollout.
    tensor_parallel:  ranks of a rollout engine.
    """

    sequence_parallel: int
    shards: int
    param_offload: Offloaded
    optimizer_offload: bool
    max_tokens: int
    utilization: float
    tensor_parallel: int

    def keys(self, roles: Collection[str]) -> dict[str, Any]:
        """Config key -> value."""
        found: dict[str, Any] = {}
        for role in (role for role in ROLES if role in roles and role != "rollout"):
            sections = sections_of(role)
            found[f"{sections.role}.ulysses_sequence_parallel_size"] = self.sequence_parallel
            found[f"{sections.fsdp}.ulysses_sequence_parallel_size"] = 1  # the larger of the two counts
            found[f"{sections.fsdp}.fsdp_size"] = self.shards
            offloads_frozen = role in FROZEN and self.param_offload == "frozen"
            found[f"{sections.fsdp}.param_offload"] = offloads_frozen or self.param_offload == "all"
            if role not in FROZEN:
                found[f"{sections.fsdp}.optimizer_offload"] = self.optimizer_offload
            for keys in RL.values():
                if keys.role == role.removesuffix("_rollout"):
                    found |= {keys.switch: True, keys.tokens: self.max_tokens}
        if not {"actor_rollout", "rollout"}.isdisjoint(roles):
            found["actor_rollout_ref.rollout.gpu_memory_utilization"] = self.utilization
            found["actor_rollout_ref.rollout.tensor_model_parallel_size"] = self.tensor_parallel
        return found


@dataclass(frozen=True)
class Pool:
    """Roles with the settings that are fastest on these GPUs.

    machines: GPUs per machine.
    stages:   seconds of its models in each stage.
    """

    roles: Roles
    machines: list[int]
    settings: Settings
    models: list[Model]
    stages: dict[str, float]

    @property
    def name(self) -> str:
        first = next(role for role in ROLES if role in self.roles)
        return _POOL_NAMES.get(first, f"{first}_pool")

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class Candidate:
    """stages: seconds of each stage of the dataflow."""

    pools: tuple[Pool, ...]
    stages: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.stages.values())


def search(
    config: PPOConfig, device: Device, typical: Lengths | None = None, tensor_parallel: Sequence[int] = (1,)
) -> list[Candidate]:
    """The fastest candidate of each placement, fastest first; empty if none fits.

    typical: lengths for the time. tensor_parallel: sizes that the rollout engine can have.
    """
    finder = _Search(config, device, typical or longest_lengths(config), tensor_parallel)
    return sorted(finder.candidates(), key=lambda candidate: (candidate.step_s, len(candidate.pools)))


class _Search:
    def __init__(self, config: PPOConfig, device: Device, typical: Lengths, tensor_parallel: Sequence[int]) -> None:
        self.config = with_values(config, {"trainer.placement": "colocate", "reward_model.enable_resource_pool": False})
        self.device, self.typical, self.tensor_parallel = device, typical, tensor_parallel
        self.per_machine, self.num_machines = config.trainer.n_gpus_per_node, config.trainer.nnodes
        policy = config.actor_rollout_ref.model
        self.has_adapters = adapters_of(policy, model_shape(policy.path, "actor_rollout_ref.model")) is not None
        self.pool, self.jobs = cache(self._pool), cache(self._jobs)

    def candidates(self) -> Iterator[Candidate]:
        models = [role for role in needed_models(self.config) if role != "ref" or not self.has_adapters]
        policies = [["actor_rollout"]] if self.has_adapters else [["actor_rollout"], ["actor", "rollout"]]
        for policy in policies:
            for partition in _partitions([*policy, *models]):
                if any({"actor", "rollout"} <= roles for roles in partition):  # that is actor_rollout
                    continue
                found = (self._pools(partition, sizes) for sizes in self._pool_sizes(len(partition)))
                if feasible := [pools for pools in found if pools is not None]:
                    fastest = min(feasible, key=lambda pools: sum(self._stages(pools).values()))
                    yield Candidate(fastest, self._stages(fastest))

    def _pools(self, partition: Sequence[Roles], sizes: Sequence[int]) -> tuple[Pool, ...] | None:
        found = []
        for roles, size in zip(partition, sizes):
            if (pool := self.pool(roles, size)) is None:
                return None
            found.append(pool)
        return tuple(found)

    def _stages(self, pools: Sequence[Pool]) -> dict[str, float]:
        models = [model for pool in pools for model in pool.models]
        return slowest_pool([pool.stages for pool in pools], transfer_time(self.device, models))

    def _pool_sizes(self, num_pools: int) -> Iterator[tuple[int, ...]]:
        """GPUs of each pool: all GPUs are used, and a pool has whole machines or a part of one."""
        total = self.per_machine * self.num_machines
        parts = range(1, self.per_machine) if self.num_machines == 1 else _powers_of_two(self.per_machine)
        sizes = [*parts, *range(self.per_machine, total + 1, self.per_machine)]
        for found in _compositions(total, num_pools, sizes):
            if _fits_machines([size for size in found if size < self.per_machine], self.per_machine):
                yield found

    def _pool(self, roles: Roles, size: int) -> Pool | None:
        """The roles with their fastest settings; None if they do not fit."""
        sp_sizes, rollouts = self._sequence_parallel_sizes(roles, size), self._rollouts(roles, size)
        if not rollouts:
            return None
        tokens = self._token_budgets(roles, sp_sizes[-1])[0]
        rollout = min(rollouts, key=lambda found: (found[0], -found[1]))
        if self._planned(roles, size, Settings(sp_sizes[-1], -1, *OFFLOAD[-1], tokens, *rollout)) is None:
            return None  # with the least memory
        best: Pool | None = None
        for sp in sp_sizes:
            without_offload = False
            for shards in self._shard_sizes(roles, size):
                for offload in (one for one in OFFLOAD if one[0] != "frozen" or roles & FROZEN):
                    settings = [
                        Settings(sp, shards, *offload, tokens, utilization, ranks)
                        for tokens in self._token_budgets(roles, sp)
                        for utilization, ranks in rollouts
                    ]
                    fitting = [pool for own in settings if (pool := self._planned(roles, size, own)) is not None]
                    if fitting:
                        best = min([*fitting, *([best] if best else [])], key=lambda pool: pool.seconds)
                        without_offload |= offload == OFFLOAD[0]
                        break
            if without_offload:
                break  # more ranks per sequence only add communication
        return best

    def _planned(self, roles: Roles, size: int, settings: Settings) -> Pool | None:
        """None if it does not fit."""
        outside = "actor" if "rollout" in roles else "rollout" if "actor" in roles else None
        longest, typical = self.jobs(size, settings, outside)
        memory = phases(_of_roles(longest, roles))
        too_large = max(phase.peak for phase in memory) + RESERVED > MOST_MEMORY * self.device.memory
        if too_large or missing_cache(longest, memory):
            return None
        job = _of_roles(typical, roles)
        stages = busy_time(memory, step_times(job, memory))
        return Pool(roles, self._machines(size), settings, job.models, stages)

    def _jobs(self, size: int, settings: Settings, outside: str | None) -> tuple[Job, Job]:
        """All roles in one pool as a job, for the longest and for typical lengths. outside: a role in a separate pool."""
        mapping = dict.fromkeys(ROLES, "pool") | {outside: "other"} if outside else {}
        spec = {"pool": self._machines(size), "other": self._machines(size)}
        keys = settings.keys(ROLES) | {"resource_pool_spec": spec, "resource_pool_mapping": mapping}
        config = with_values(self.config, keys)
        longest = job_of(config, self.device, longest_lengths(config), model_shape)
        if self.typical == longest.lengths:
            return longest, longest
        return longest, job_of(config, self.device, self.typical, model_shape)

    def _machines(self, size: int) -> list[int]:
        return [size] if size <= self.per_machine else [self.per_machine] * (size // self.per_machine)

    def _sequence_parallel_sizes(self, roles: Roles, size: int) -> list[int]:
        if roles == {"rollout"}:
            return [1]
        models = {sections_of(role).model for role in roles - {"rollout"}}
        values = {section: attrgetter(section)(self.config) for section in models}
        if not all(model.use_remove_padding for model in values.values()):
            return [1]
        heads = [model_shape(model.path, section).heads for section, model in values.items()]
        sizes = _powers_of_two(min(size, self.per_machine) + 1)
        return [sp for sp in sizes if size % sp == 0 and all(count % sp == 0 for count in heads)]

    def _shard_sizes(self, roles: Roles, size: int) -> list[int]:
        """All ranks, or those of one machine with replicas on the others."""
        return [-1] if size <= self.per_machine or roles == {"rollout"} else [-1, self.per_machine]

    def _token_budgets(self, roles: Roles, sp: int) -> list[int]:
        if roles == {"rollout"}:
            return [TOKEN_BUDGETS[0]]
        needed = -(-longest_lengths(self.config).total // sp)
        return sorted({max(needed, tokens) for tokens in TOKEN_BUDGETS})

    def _rollouts(self, roles: Roles, size: int) -> list[tuple[float, int]]:
        """(share of the memory, tensor-parallel ranks)."""
        given = self.config.actor_rollout_ref.rollout.gpu_memory_utilization
        if not roles & {"actor_rollout", "rollout"}:
            return [(given, 1)]
        shares = sorted({given, *(share for share in UTILIZATIONS if share > given)})
        return [(share, ranks) for share in shares for ranks in self.tensor_parallel if size % ranks == 0]


def _of_roles(job: Job, roles: Roles) -> Job:
    return replace(job, models=[model for model in job.models if model.role in roles])


def overrides_of(candidate: Candidate, config: PPOConfig) -> dict[str, Any]:
    """The keys to set, without those that have their value already or get it from another key."""
    wanted = {
        key: value for pool in candidate.pools for key, value in pool.settings.keys(pool.roles).items()
    } | _placement(candidate, config)
    values, default_tree = to_plain(config), defaults(PPOConfig)

    def otherwise(key: str) -> Any:
        """The value without an override."""
        default, value = get_in(default_tree, key, None), get_in(values, key, None)
        source = default[2:-1] if isinstance(default, str) and default.startswith("${") else None
        if source is None or get_in(values, source, None) != value:
            return value
        return wanted.get(source, value)

    return {key: value for key, value in wanted.items() if otherwise(key) != value}


def _placement(candidate: Candidate, config: PPOConfig) -> dict[str, Any]:
    """A named placement if it gives the same pools, else the pools."""
    own_pool = {"reward_model.enable_resource_pool": False}  # that would be GPUs besides the cluster's
    wanted = {pool.roles: pool.machines for pool in candidate.pools}
    for name in POOLS:
        try:
            named = pools_of(with_values(config, own_pool | {"trainer.placement": name}), needed_models(config))
        except TooFewWorkers:
            continue
        roles = {pool: frozenset(role for role, own in named.role_pools.items() if own == pool) for pool in named.spec}
        if {roles[pool]: machines for pool, machines in named.spec.items()} == wanted:
            return own_pool | {"trainer.placement": name}
    return own_pool | {
        "trainer.placement": "colocate",
        "resource_pool_spec": {pool.name: pool.machines for pool in candidate.pools},
        "resource_pool_mapping": {role: pool.name for pool in candidate.pools for role in ROLES if role in pool.roles},
    }


def _partitions(roles: list[str]) -> Iterator[list[Roles]]:
    """All ways to divide the roles into pools."""
    if not roles:
        yield []
        return
    first, *rest = roles
    for partition in _partitions(rest):
        yield [frozenset({first}), *partition]
        for i, block in enumerate(partition):
            yield [block | {first}, *partition[:i], *partition[i + 1 :]]


def _compositions(total: int, count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` of the sizes with this sum."""
    if count == 1:
        if total in sizes:
            yield (total,)
        return
    for size in sizes:
        if size < total:
            yield from ((size, *rest) for rest in _compositions(total - size, count - 1, sizes))


def _fits_machines(parts: Sequence[int], per_machine: int) -> bool:
    """Whether parts of machines fill whole ones."""
    free: list[int] = []
    for part in sorted(parts, reverse=True):
        place = next((i for i, room in enumerate(free) if room >= part), None)
        if place is None:
            free.append(per_machine - part)
        else:
            free[place] -= part
    return not any(free)


def _powers_of_two(end: int) -> list[int]:
    return [2**i for i in range(end.bit_length()) if 2**i < end]
