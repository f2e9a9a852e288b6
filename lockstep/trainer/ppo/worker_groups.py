"""The workers of a run: the processes of each pool, and in them one worker group per role, whose models are loaded.

role classes ─► by pool: one process per rank, with all roles of the pool ─► groups ─► load the models
groups ─► sampling (generate, score) and, if the rollout holds a copy of the weights, weight updates
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lockstep.agents.agents import Agents
from lockstep.algorithms.advantages import required_inputs
from lockstep.config.actor_rollout_ref import quantization_of
from lockstep.config.placement import is_trained
from lockstep.config.ppo import PPOConfig
from lockstep.config.train_engines import engine_settings, ranks_per_row
from lockstep.engines.rollout import ROLLOUT_ENGINES
from lockstep.engines.rollout.rollout_engine import rollout_dtype
from lockstep.models.loading import resolve_dtype
from lockstep.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePoolManager,
    Role,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
)
from lockstep.trainer.ppo.agent_rollout import AgentRollout
from lockstep.trainer.ppo.async_sampling import AsyncSampling
from lockstep.trainer.ppo.run_agents import start_agent_workers
from lockstep.trainer.ppo.sampling import RewardFn, Sampling
from lockstep.trainer.ppo.worker_calls import critic_warmup
from lockstep.trainer.run.inputs import fetch_on_workers
from lockstep.utils.audit import Audits
from lockstep.weight_sync import Transport, WeightSync, canary_bound
from lockstep.workers.agent_client import AgentClient

logger = logging.getLogger(__name__)


class WorkerGroups:
    """See the module docstring.

    roles:           Role -> Worker class.
    pools:           the pool of each role.
    agents:          the loops of the rows; None if all responses are single-turn.
    group_class:     worker group class of the backend.
    class_with_init: wraps a worker class with its arguments.
    groups:          the group of each role, after `start`.
    processes:       the groups of all roles of a pool: each worker process is in one.
    """

    def __init__(
        self,
        roles: dict[Role, type[Worker]],
        pools: ResourcePoolManager,
        device: str,
        agents: Agents | None = None,
        group_class: Callable[..., WorkerGroup] = LocalWorkerGroup,
        class_with_init: Callable[..., ClassWithInitArgs] = ClassWithInitArgs,
    ) -> None:
        self.roles = roles
        self.pools = pools
        self.device = device
        self.agents = agents
        self.group_class = group_class
        self.class_with_init = class_with_init
        self.agent_workers: AgentClient | None = None
        self.groups: dict[str, WorkerGroup] = {}
        self.processes: list[WorkerGroup] = []
        self._rollout_processes: WorkerGroup | None = None
        """Those of the rollout, if it has its own pool."""
        self._stop_address: tuple[str, int] | None = None

    @property
    def count(self) -> int:
        return self.pools.get_n_gpus()

    def start(self, config: PPOConfig, num_steps: int) -> None:
        """Create the groups (roles of a pool share processes) and load the models. num_steps: of the run."""
        self._start_agent_workers(config)
        self.pools.create_resource_pool()
        if self.count > 1:
            logger.info("starting %d workers", self.count)
        by_pool: dict[Any, dict[str, ClassWithInitArgs]] = {}
        for role, init in self._role_classes(config, num_steps).items():
            by_pool.setdefault(self.pools.get_resource_pool(role), {})[str(role)] = init
        for pool, classes in by_pool.items():
            colocated = self.group_class(pool, create_colocated_worker_cls(classes))
            self.processes.append(colocated)
            self.groups |= colocated.spawn(prefix_set=classes.keys())
            if list(classes) == [str(Role.Rollout)]:
                self._rollout_processes = colocated
                colocated.tolerate_deaths()
        fetch_on_workers(config, self.groups.values())
        for group in self.groups.values():
            group.init_model()

    def adopt(self, config: PPOConfig, groups: Mapping[str, WorkerGroup], processes: Iterable[WorkerGroup]) -> None:
        """Use groups that others have created and loaded."""
        self.groups, self.processes = dict(groups), list(processes)
        self._start_agent_workers(config)

    def wait_ready(self) -> None:
        """Wait for the agent workers, which load while models do."""
        if self.agent_workers is not None:
            self.agent_workers.wait_ready()

    def only_rollout_died(self) -> bool:
        """Whether the rollout has its own processes, one of which has died, and no other has."""
        own = self._rollout_processes
        if own is None or not own.dead_ranks():
            return False
        return not any(group.dead_ranks() for group in self.processes if group is not own)

    def restart_rollout(self) -> None:
        """Start the rollout's own processes again and load its model; ValueError if there is no machine for them."""
        assert self._rollout_processes is not None
        self._rollout_processes.restart()
        self._rollout_processes.tolerate_deaths()
        group: Any = self.groups[str(Role.Rollout)]
        if hasattr(group, "fetch_model"):
            group.fetch_model()
        group.init_model()
        if self._stop_address is not None:
            group.listen_for_stop(self._stop_address)

    def listen_for_stop(self, address: tuple[str, int]) -> None:
        """Let the processes that generate end a batch early when the controller calls (`StopLine`)."""
        self._stop_address = address
        self.group(Role.ActorRollout, Role.Rollout).listen_for_stop(address)

    def close(self) -> None:
        """Shut down the workers."""
        if self.agent_workers is not None:
            self.agent_workers.close()
        for group in self.groups.values():
            group.shutdown()
        self.groups, self.processes = {}, []
        self.pools.shutdown()

    def group(self, *roles: Role) -> Any:
        """The group of the first of the roles that there is; None if there is none."""
        return next((self.groups[str(role)] for role in roles if str(role) in self.groups), None)

    def responder(self, pad_token_id: int, batch_size: int) -> Any:
        """What answers prompts: the rollout's workers, or agents that use them. batch_size: see `AgentRollout`."""
        rollout_wg = self.group(Role.ActorRollout, Role.Rollout)
        if self.agents is None:
            return rollout_wg
        return AgentRollout(self.agent_workers or self.agents, rollout_wg, pad_token_id, batch_size)

    def describe(self, config: PPOConfig) -> str:
        """Each pool with its processes per machine and its roles, and how many ranks of the actor share their rows."""
        roles: dict[str, list[str]] = {}
        for role, pool in self.pools.mapping.items():
            roles.setdefault(pool, []).append(str(role))
        pools = [f"{pool} {self.pools.resource_pool_spec[pool]} {', '.join(names)}" for pool, names in roles.items()]
        shared = ranks_per_row(config.actor_rollout_ref.actor)
        return "; ".join(pools) + (f"; {shared} ranks per sequence" if shared > 1 else "")

    def _start_agent_workers(self, config: PPOConfig) -> None:
        if self.agents is not None and config.actor_rollout_ref.rollout.agent.num_workers:
            self.agent_workers = start_agent_workers(config)

    def _role_classes(self, config: PPOConfig, num_steps: int) -> dict[Role, ClassWithInitArgs]:
        policy, critic = config.actor_rollout_ref, config.critic
        actor = _with_schedule_length(policy.actor, num_steps - critic_warmup(config))
        if "sum_pi_squared" in required_inputs(config.algorithm.adv_estimator):
            actor = replace(actor, calculate_sum_pi_squared=True)
        policy = replace(policy, actor=actor)
        sections: dict[Role, Any] = {
            Role.Critic: _with_schedule_length(critic, num_steps),
            Role.RewardModel: config.reward_model,
        }
        return {
            role: self.class_with_init(worker, config=sections[role], device=self.device)
            if role in sections
            else self.class_with_init(worker, config=policy, role=str(role), device=self.device)
            for role, worker in self.roles.items()
        }


def compute_dtype(config: PPOConfig, device: str) -> torch.dtype:
    """The actor's."""
    return resolve_dtype(engine_settings(config.actor_rollout_ref.actor).dtype, torch.device(device))


def create_sampling(config: PPOConfig, rollout_wg: Any, rm_wg: Any, reward_fn: RewardFn, pad_token_id: int) -> Sampling:
    """Whole batches, or group by group if the settings or the reward function gain from it."""
    settings = config.actor_rollout_ref.rollout
    in_parts = getattr(reward_fn, "scores_rows_alone", False)
    in_parts |= settings.over_sample_rate > 0 or config.trainer.async_mode is not None
    if settings.mode == "sync" or not in_parts:
        return Sampling(config, rollout_wg, rm_wg, reward_fn)
    return AsyncSampling(config, rollout_wg, rm_wg, reward_fn, pad_token_id=pad_token_id)


def create_weight_sync(config: PPOConfig, workers: WorkerGroups, audits: Audits) -> WeightSync | None:
    """None if the rollout uses the actor's tensors. audits: get what the proof finds."""
    policy, device = config.actor_rollout_ref, torch.device(workers.device)
    is_colocated = workers.group(Role.ActorRollout) is not None
    if is_colocated and ROLLOUT_ENGINES.info(policy.rollout.name).shares_weights:
        return None
    actor_wg = workers.group(Role.ActorRollout, Role.Actor)
    rollout_wg = workers.group(Role.ActorRollout, Role.Rollout)
    dtypes = compute_dtype(config, workers.device), rollout_dtype(policy, device)
    bound = canary_bound(*dtypes, quantized=bool(quantization_of(vars(policy.rollout))))
    backend = policy.rollout.checkpoint_engine.backend
    transport: Transport = backend if backend != "auto" else "nccl" if workers.device == "cuda" else "naive"
    if not is_trained(config) and not all(rollout_wg.takes_weights()):
        transport = "none"
    elif is_colocated:
        transport = "in_process"
    if (command := policy.rollout.server.reload_command) is not None and transport != "none":
        stale = f"the server computes with other weights than those that actor_rollout_ref.rollout.server.reload_command={command} "
        stale += "was told to load; it must load {folder}, and end only when the server with the old weights no longer answers"
        return WeightSync(actor_wg, rollout_wg, transport, bound, audits, if_stale=stale)
    return WeightSync(actor_wg, rollout_wg, transport, bound, audits)


def _with_schedule_length(section: Any, num_steps: int) -> Any:
    """The section with its schedule length set to the number of its update steps, unless the user set one."""
    if section.optim.total_training_steps > 0:
        return section
    return replace(section, optim=replace(section.optim, total_training_steps=max(1, num_steps)))
