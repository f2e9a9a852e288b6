"""Find the placement, pool sizes, parallel sizes, token budgets and offload of a run: the mapping search of HybridFlow.

    roles ─► set partitions into pools ─► GPUs of each pool ─► best settings of each pool ─► stages of the dataflow ─► fastest

The settings of a pool depend only on its roles and its GPUs, so that each such pair is planned once. Memory and time are those of
`lockstep plan`. What changes results (batch sizes, dtypes, lengths) is left as it is.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, Literal

from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.micro_batches import RL
from lockstep.config.placement import POOLS, ROLES, TooFewWorkers, needed_models, pools_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import FSDP, sections_of
from lockstep.config.schema import defaults, get_in, to_plain, with_values
from lockstep.plan.adapters import adapters_of
from lockstep.plan.batch_units import Lengths
from lockstep.plan.dataflow import busy_time, slowest_pool
from lockstep.plan.estimate import longest_lengths, model_shape
from lockstep.plan.hardware import Device
from lockstep.plan.job import Job, job_of
from lockstep.plan.memory import RESERVED, missing_cache, phases
from lockstep.plan.model import Model
from lockstep.plan.model_shape import ModelShape
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

MOST_LAYOUTS = 12
"""Parallel sizes of Megatron that are planned with all other settings."""

_POOL_NAMES = {"actor_rollout": "actor_pool", "rm": "reward_pool"}

Roles = frozenset[str]


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes of the models of a pool.

    sequence_parallel, shards:   of FSDP; shards: ranks that hold one copy of a model, -1 for all.
    tensor, pipeline, expert:    of Megatron.
    zero_stage:                  of DeepSpeed.
    """

    sequence_parallel: int = 1
    shards: int = -1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    zero_stage: int = 2


@dataclass(frozen=True)
class Settings:
    """What the search varies for all roles of a pool.

    param_offload:    models whose parameters are offloaded; frozen: only those that are not trained.
    max_tokens:       of a micro-batch on one GPU.
    utilization:      share of the memory for the rollout.
    tensor_parallel:  ranks of a rollout engine.
    """

    sizes: Sizes
    param_offload: Offloaded
    optimizer_offload: bool
    max_tokens: int
    utilization: float
    tensor_parallel: int

    def keys(self, roles: Collection[str], engines: Mapping[str, str]) -> dict[str, Any]:
        """Config key -> value. engines: role -> `TrainEngineInfo.section` of its training engine."""
        found: dict[str, Any] = {}
        for role in (role for role in ROLES if role in roles and role != "rollout"):
            sections, section = sections_of(role), engines[role]
            engine = sections.of_engine(section)
            offloads = self.param_offload == "all" or (role in FROZEN and self.param_offload == "frozen")
            own = _ENGINE_KEYS[section](self.sizes, offloads, role not in FROZEN)
            found |= {f"{engine}.{key}": value for key, value in own.items()}
            if section == FSDP:
                found[f"{sections.role}.ulysses_sequence_parallel_size"] = self.sizes.sequence_parallel
            if role not in FROZEN:
                found[f"{engine}.optimizer_offload"] = self.optimizer_offload
            for keys in RL.values():
                if keys.role == role.removesuffix("_rollout"):
                    found |= {keys.switch: True, keys.tokens: self.max_tokens}
        if not {"actor_rollout", "rollout"}.isdisjoint(roles):
            found["actor_rollout_ref.rollout.gpu_memory_utilization"] = self.utilization
            found["actor_rollout_ref.rollout.tensor_model_parallel_size"] = self.tensor_parallel
        return found


def _fsdp_keys(sizes: Sizes, offloads: bool, is_trained: bool) -> dict[str, Any]:
    # the larger of the engine's and the role's ulysses_sequence_parallel_size counts
    return {"ulysses_sequence_parallel_size": 1, "fsdp_size": sizes.shards, "param_offload": offloads}


def _megatron_keys(sizes: Sizes, offloads: bool, is_trained: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": 1 if sizes.expert > 1 else None,
        "param_offload": offloads,
    }
    return found | ({"grad_offload": offloads} if is_trained else {})


def _deepspeed_keys(sizes: Sizes, offloads: bool, is_trained: bool) -> dict[str, Any]:
    can_offload = sizes.zero_stage == 3 or not is_trained
    return {"zero_stage": sizes.zero_stage, "param_offload": offloads and can_offload}


_ENGINE_KEYS = {FSDP: _fsdp_keys, "megatron": _megatron_keys, "deepspeed": _deepspeed_keys}
"""Section of an engine -> (sizes, whether parameters are offloaded, whether it trains) -> its keys."""


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
        self.engines = engines_of(config)
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
        groups, rollouts = self._sizes(roles, size), self._rollouts(roles, size)
        if not rollouts or not groups:
            return None
        if len(groups) > 1:  # the last group needs the least memory
            least = min(rollouts, key=lambda found: (found[0], -found[1]))
            tokens = self._token_budgets(roles, groups[-1][0].sequence_parallel)[0]
            if self._planned(roles, size, Settings(groups[-1][0], *OFFLOAD[-1], tokens, *least)) is None:
                return None
        best: Pool | None = None
        for group in groups:
            without_offload = False
            for sizes in group:
                for offload in (one for one in OFFLOAD if one[0] != "frozen" or roles & FROZEN):
                    settings = [
                        Settings(sizes, *offload, tokens, utilization, ranks)
                        for tokens in self._token_budgets(roles, sizes.sequence_parallel)
                        for utilization, ranks in rollouts
                    ]
                    fitting = [pool for own in settings if (pool := self._planned(roles, size, own)) is not None]
                    if fitting:
                        best = min([*fitting, *([best] if best else [])], key=lambda pool: pool.seconds)
                        without_offload |= offload == OFFLOAD[0]
                        break
            if without_offload:
                break  # the next group only adds communication
        return best

    def _planned(self, roles: Roles, size: int, settings: Settings) -> Pool | None:
        """None if it does not fit."""
        outside = "actor" if "rollout" in roles else "rollout" if "actor" in roles else None
        # sizes of FSDP and DeepSpeed suit every model, so that the pools of all roles share the jobs
        divided = roles if "megatron" in self.engines.values() else frozenset(ROLES)
        longest, typical = self.jobs(size, settings, outside, divided)
        memory = phases(_of_roles(longest, roles))
        too_large = max(phase.peak for phase in memory) + RESERVED > MOST_MEMORY * self.device.memory
        if too_large or missing_cache(longest, memory):
            return None
        job = _of_roles(typical, roles)
        stages = busy_time(memory, step_times(job, memory))
        return Pool(roles, self._machines(size), settings, job.models, stages)

    def _jobs(self, size: int, settings: Settings, outside: str | None, divided: Roles) -> tuple[Job, Job]:
        """All roles in one pool as a job, for the longest and for typical lengths.

        outside: a role in a separate pool. divided: roles that have the parallel sizes of `settings`; others are not divided.
        """
        mapping = dict.fromkeys(ROLES, "pool") | {outside: "other"} if outside else {}
        spec = {"pool": self._machines(size), "other": self._machines(size)}
        keys = replace(settings, sizes=Sizes()).keys(ROLES, self.engines) | settings.keys(divided, self.engines)
        keys |= {"resource_pool_spec": spec, "resource_pool_mapping": mapping}
        config = with_values(self.config, keys)
        longest = job_of(config, self.device, longest_lengths(config), model_shape)
        if self.typical == longest.lengths:
            return longest, longest
        return longest, job_of(config, self.device, self.typical, model_shape)

    def _machines(self, size: int) -> list[int]:
        return [size] if size <= self.per_machine else [self.per_machine] * (size // self.per_machine)

    def _sizes(self, roles: Roles, size: int) -> list[list[Sizes]]:
        """Parallel sizes to try, in groups of which each adds communication and saves memory."""
        engines = {self.engines[role] for role in roles - {"rollout"}}
        if "megatron" in engines:
            return [self._megatron_sizes(roles, size)]
        if "deepspeed" in engines:
            return [[Sizes(zero_stage=stage)] for stage in (1, 2, 3)]
        shard_sizes = [-1] if size <= self.per_machine or not engines else [-1, self.per_machine]
        return [[Sizes(sp, shards) for shards in shard_sizes] for sp in self._sequence_parallel_sizes(roles, size)]

    def _megatron_sizes(self, roles: Roles, size: int) -> list[Sizes]:
        """All that divide ranks, layers and heads; tensor parallelism within a machine, experts within a stage."""
        shapes = self._shapes(roles)
        experts = [shape.routed_experts for shape in shapes if shape.routed_experts]
        found = []
        for tensor in _powers_of_two(min(size, self.per_machine) + 1):
            for pipeline in range(1, min(shape.layers for shape in shapes) + 1):
                stage, rest = divmod(size, pipeline)
                if rest or stage % tensor or not _divides(tensor, pipeline, shapes):
                    continue
                for expert in _powers_of_two(min(experts, default=1) + 1):
                    if stage % expert == 0 and all(count % expert == 0 for count in experts):
                        found.append(Sizes(tensor=tensor, pipeline=pipeline, expert=expert))
        fewest = sorted(found, key=lambda sizes: sizes.tensor * sizes.pipeline * sizes.expert)
        return self._promising(roles, size, fewest)

    def _promising(self, roles: Roles, size: int, candidates: Sequence[Sizes]) -> list[Sizes]:
        """Those that fit with the least memory, the fastest of them first."""
        rollout = min(self._rollouts(roles, size), key=lambda found: (found[0], -found[1]), default=None)
        if rollout is None:
            return []
        tokens = self._token_budgets(roles, 1)[0]
        planned = [
            (pool.seconds, number)
            for number, sizes in enumerate(candidates)
            if (pool := self._planned(roles, size, Settings(sizes, *OFFLOAD[-1], tokens, *rollout))) is not None
        ]
        return [candidates[number] for _, number in sorted(planned)[:MOST_LAYOUTS]]

    def _shapes(self, roles: Roles) -> list[ModelShape]:
        models = {sections_of(role).model for role in roles - {"rollout"}}
        return [model_shape(attrgetter(section)(self.config).path, section) for section in models]

    def _sequence_parallel_sizes(self, roles: Roles, size: int) -> list[int]:
        if roles == {"rollout"}:
            return [1]
        models = {sections_of(role).model for role in roles - {"rollout"}}
        if not all(attrgetter(section)(self.config).use_remove_padding for section in models):
            return [1]
        heads = [shape.heads for shape in self._shapes(roles)]
        sizes = _powers_of_two(min(size, self.per_machine) + 1)
        return [sp for sp in sizes if size % sp == 0 and all(count % sp == 0 for count in heads)]

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


def engines_of(config: PPOConfig) -> dict[str, str]:
    """Role -> the section of its training engine."""
    return {role: TRAIN_ENGINES.info(sections_of(role).config(config).strategy).section for role in ROLES}


def _divides(tensor: int, pipeline: int, shapes: Sequence[ModelShape]) -> bool:
    return all(not (s.layers % pipeline or s.heads % tensor or s.key_heads % tensor) for s in shapes)


def _of_roles(job: Job, roles: Roles) -> Job:
    return replace(job, models=[model for model in job.models if model.role in roles])


def overrides_of(candidate: Candidate, config: PPOConfig) -> dict[str, Any]:
    """The keys to set, without those that have their value already or get it from another key."""
    wanted = {
        key: value
        for pool in candidate.pools
        for key, value in pool.settings.keys(pool.roles, engines_of(config)).items()
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
