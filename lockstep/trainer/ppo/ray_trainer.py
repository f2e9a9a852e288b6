"""The PPO loop: a plain Python loop on the controller; every arrow is a call on a worker group.

    prompts ─► generate ─► reward ─► old log-probs ─► ref log-probs ─► values ─► advantage ─► update critic ─► update actor

If a step is a single update, its own log-probs are the old ones, and the old log-prob pass is skipped.

One `DataProto` passes through all stages and gains keys (`protocol/keys.py`). The loop does not depend on whether a worker group is
in this process or on many machines.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lockstep.agents.agents import Agents
from lockstep.algorithms.advantages import check_inputs, get_adv_estimator_fn, required_inputs
from lockstep.algorithms.compute_advantage import compute_advantage
from lockstep.algorithms.kl import apply_kl_penalty, get_kl_controller
from lockstep.algorithms.losses.aggregate import agg_loss
from lockstep.algorithms.losses.policy import with_loss_settings
from lockstep.algorithms.pf_ppo import pf_ppo_rows
from lockstep.algorithms.rollout_correction import apply_rollout_correction, use_rollout_log_probs
from lockstep.config.actor_rollout_ref import has_cut_log_probs
from lockstep.config.batch_sizes import fitted_to_rows
from lockstep.config.model import sequence_parallel_size
from lockstep.config.old_log_probs import OldLogProbs, old_log_probs_source
from lockstep.config.placement import is_trained, need_critic, need_reference_policy, need_reward_model
from lockstep.config.plugin_settings import estimator_settings
from lockstep.config.ppo import PPOConfig, prompts_per_batch
from lockstep.config.schema import as_written
from lockstep.data.loader import StatefulLoader, create_dataloader, shuffled_order
from lockstep.engines.rollout import ROLLOUT_ENGINES
from lockstep.engines.rollout.rollout_engine import rollout_dtype
from lockstep.models.loading import resolve_dtype
from lockstep.observability.rollout_log import dump_generations
from lockstep.observability.run_folder import CONFIG
from lockstep.observability.trackers import Tracking
from lockstep.protocol import DataProto
from lockstep.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePoolManager,
    Role,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
)
from lockstep.trainer.ppo import forks
from lockstep.trainer.ppo.agent_rollout import AgentRollout
from lockstep.trainer.ppo.async_sampling import AsyncSampling
from lockstep.trainer.ppo.audit import (
    CutResponses,
    FailedConversations,
    IdleSteps,
    check_finite,
    check_policy_version,
    rollout_gap,
)
from lockstep.trainer.ppo.metrics import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from lockstep.trainer.ppo.mini_batches import (
    MiniBatches,
    call_balanced,
    lay_out,
    loss_preparation,
    mini_batches_of,
    spread,
)
from lockstep.trainer.ppo.rollout_sources import create_source
from lockstep.trainer.ppo.run_agents import start_agent_workers
from lockstep.trainer.ppo.sampling import FailureLimit, RewardFn, Sampling, extra_metrics
from lockstep.trainer.ppo.validation import Responses, prompt_batches
from lockstep.trainer.run.checkpoint import CheckpointStore, RunLock
from lockstep.trainer.run.inputs import fetch_on_workers
from lockstep.trainer.run.interrupt import Interrupt, StopRequested
from lockstep.trainer.run.memory_check import with_chosen_sizes
from lockstep.trainer.run.run_config import (
    as_yaml,
    check_same_experiment,
    report_changes,
    saved_config,
    warn_if_epochs_end_first,
    warn_if_on_cpu,
    write_run_config,
)
from lockstep.trainer.run.step_profiler import StepProfiler, profiled_roles
from lockstep.utils.audit import GapBound
from lockstep.utils.decoding import decode_all
from lockstep.utils.device import resolve_device
from lockstep.utils.metrics import reduced_over_ranks
from lockstep.utils.progress import phase
from lockstep.utils.seqlen import log_seqlen_unbalance
from lockstep.utils.spans import span
from lockstep.utils.state_file import load_state, save_state
from lockstep.utils.timing import marked_timer
from lockstep.weight_sync import Transport, WeightSync, canary_bound
from lockstep.workers.agent_client import AgentClient

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, Any]], bool]
"""Called with the step (0: validation before training) and its metrics when they are logged; True stops after the step."""


class PPOTrainer:
    """Trains a policy by PPO, GRPO or any other registered advantage estimator.

    role_worker_mapping:   Role -> Worker class.
    resource_pool_manager: the pool of each role.
    ray_worker_group_cls:  worker group class of the backend; class_with_init wraps a worker class with its arguments.
    reward_fn:             scores training rollouts; val_reward_fn those of validation (None: no validation).
    agents:                the loops of the rows; None if all responses are single-turn.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: dict[Role, type[Worker]],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: Callable[..., WorkerGroup] = LocalWorkerGroup,
        reward_fn: RewardFn | None = None,
        val_reward_fn: RewardFn | None = None,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        class_with_init: Callable[..., ClassWithInitArgs] = ClassWithInitArgs,
        agents: Agents | None = None,
    ) -> None:
        if (train_dataset is None and not config.trainer.val_only) or reward_fn is None:
            raise ValueError("PPOTrainer needs train_dataset (unless trainer.val_only=true) and reward_fn")
        self.device_name = device_name or resolve_device(config.trainer.device)
        if train_dataset is not None:
            config = fitted_to_rows(config, len(cast(Sized, train_dataset)))
        config = with_chosen_sizes(config, self.device_name)
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.worker_group_cls, self.class_with_init = ray_worker_group_cls, class_with_init
        self.agents = agents
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.use_critic = need_critic(config)
        self.critic_warmup = config.trainer.critic_warmup if self.use_critic else 0
        self.use_reference_policy = need_reference_policy(config)
        self.use_rm = need_reward_model(config)
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        if train_dataset is not None:
            check_inputs(config.algorithm.adv_estimator, self._batch_keys())
            estimator_settings(get_adv_estimator_fn(config.algorithm.adv_estimator), config.algorithm.adv_kwargs)
        with_loss_settings(config.actor_rollout_ref.actor)
        self.train_dataloader: Any = None
        if train_dataset is not None:
            self.train_dataloader = self._train_dataloader(train_dataset, train_sampler, collate_fn)
        self.val_dataset = val_dataset
        self.collate_fn = collate_fn
        steps_of_epochs = len(self.train_dataloader or ()) * config.trainer.total_epochs
        max_steps = config.trainer.total_training_steps
        self.total_training_steps = steps_of_epochs if max_steps is None else min(max_steps, steps_of_epochs)
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.checkpoints = CheckpointStore(self.run_dir, keep=self._checkpoints_to_keep())
        self.last_checkpoint: Path | None = None
        self.global_steps = 0
        self.epoch = 0
        self.num_updates = 0
        self.max_staleness = config.trainer.max_staleness if config.trainer.async_mode is not None else 0
        self.loader_state: dict[str, Any] = {}
        """State of the data loader after the last complete step: the one that checkpoints save."""
        self.idle_steps, self.cut_responses = IdleSteps(), CutResponses()
        self.failed_conversations = FailedConversations()
        compute_dtype = resolve_dtype(config.actor_rollout_ref.actor.fsdp_config.dtype, torch.device(self.device_name))
        self.gap_bound = GapBound(compute_dtype)
        roles = profiled_roles(config, map(str, role_worker_mapping))
        self.profiler = StepProfiler(config, roles, self.total_training_steps, self.device_name)
        self.agent_workers: AgentClient | None = None
        self._groups: dict[str, WorkerGroup] = {}
        self._processes: list[WorkerGroup] = []
        """The groups of all roles of a pool: each worker process is in one."""
        self._closing: ExitStack | None = None
        self.on_step: OnStep | None = None

    def _train_dataloader(self, dataset: Dataset[Any], sampler: Any, collate_fn: Any) -> StatefulLoader:
        data, seed = self.config.data, self.config.trainer.seed
        batch_size, num_rows = prompts_per_batch(self.config), len(cast(Sized, dataset))
        if (data.gen_batch_size or data.train_batch_size) <= num_rows < batch_size:
            rate = self.config.actor_rollout_ref.rollout.over_sample_rate
            raise ValueError(
                f"actor_rollout_ref.rollout.over_sample_rate={rate:g}: a step generates {batch_size} prompts, but the dataset has "
                f"only {num_rows} rows; lower it, or data.train_batch_size={data.train_batch_size}"
            )
        return create_dataloader(
            dataset,
            batch_size=batch_size,
            shuffle=data.shuffle,
            seed=seed if data.seed is None else data.seed,
            num_workers=data.dataloader_num_workers,
            drop_last=True,
            sampler=sampler,
            collate_fn=collate_fn,
        )

    def _batch_keys(self) -> set[str]:
        """Batch keys of this run that advantage estimators can read."""
        keys = {"index", "old_log_probs", "rollout_log_probs", "reward_baselines", "token_level_scores"}
        if self.use_critic:
            keys.add("values")
        if not self.config.algorithm.rollout_correction.bypass_mode:
            keys |= {"entropys", "sum_pi_squared"}
        return keys

    def init_workers(self) -> None:
        """Create the worker groups (roles of a pool share processes) and load the models."""
        if self.agents is not None and self.config.actor_rollout_ref.rollout.agent.num_workers:
            self.agent_workers = start_agent_workers(self.config)
        self.resource_pool_manager.create_resource_pool()
        if (count := self.resource_pool_manager.get_n_gpus()) > 1:
            logger.info("starting %d workers", count)
        by_pool: dict[Any, dict[str, ClassWithInitArgs]] = {}
        for role, init in self._role_classes().items():
            pool = self.resource_pool_manager.get_resource_pool(role)
            by_pool.setdefault(pool, {})[str(role)] = init
        for pool, class_dict in by_pool.items():
            colocated = self.worker_group_cls(pool, create_colocated_worker_cls(class_dict))
            self._processes.append(colocated)
            self._groups |= colocated.spawn(prefix_set=class_dict.keys())
        fetch_on_workers(self.config, self._groups.values())
        for group in self._groups.values():
            group.init_model()
        self._use_groups()

    def _use_groups(self) -> None:
        """Build on the worker groups, whose models are loaded: sampling, weight updates, the source of samples."""
        groups: dict[str, Any] = self._groups
        colocated_wg = groups.get(str(Role.ActorRollout))
        self.actor_rollout_wg: Any = colocated_wg or groups[str(Role.Actor)]
        self.rollout_wg: Any = colocated_wg or groups[str(Role.Rollout)]
        has_adapters = self.config.actor_rollout_ref.model.lora_rank > 0
        self.ref_policy_wg: Any = self.actor_rollout_wg if has_adapters else groups.get(str(Role.RefPolicy))
        self.critic_wg: Any = groups.get(str(Role.Critic))
        self.rm_wg: Any = groups.get(str(Role.RewardModel))
        if self.rm_wg is not None and hasattr(self.rm_wg, "check_tokenizer"):  # a class of the user's may have none
            self.rm_wg.check_tokenizer(self.tokenizer.get_vocab())
        self.sampling = self._sampling()
        self.weight_sync = None
        policy, device = self.config.actor_rollout_ref, torch.device(self.device_name)
        if colocated_wg is None or not ROLLOUT_ENGINES.get(policy.rollout.name).shares_weights:
            transport = self._weight_transport(is_colocated=colocated_wg is not None)
            dtypes = self.gap_bound.dtype, rollout_dtype(policy, device)
            bound = canary_bound(*dtypes, quantized=policy.rollout.quantization is not None)
            self.weight_sync = WeightSync(self.actor_rollout_wg, self.rollout_wg, transport, bound)
        self.source = create_source(self.config, self.sampling, self.weight_sync, self.total_training_steps)
        if self.agent_workers is not None:
            self.agent_workers.wait_ready()

    def _rollout(self) -> Any:
        """What answers prompts: the rollout's workers, or agents that use them."""
        if self.agents is None:
            return self.rollout_wg
        batch_size = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return AgentRollout(self.agent_workers or self.agents, self.rollout_wg, self.tokenizer.pad_token_id, batch_size)

    def _sampling(self) -> Sampling:
        workers = self.config, self._rollout(), self.rm_wg, self.reward_fn
        settings = self.config.actor_rollout_ref.rollout
        in_parts = getattr(self.reward_fn, "scores_rows_alone", False)
        in_parts |= settings.over_sample_rate > 0 or self.config.trainer.async_mode is not None
        if settings.mode == "sync" or not in_parts:
            return Sampling(*workers)
        return AsyncSampling(*workers, pad_token_id=self.tokenizer.pad_token_id)

    def _weight_transport(self, *, is_colocated: bool) -> Transport:
        """How weights are sent to a rollout that holds a copy."""
        if not is_trained(self.config) and not all(self.rollout_wg.takes_weights()):
            return "none"
        if is_colocated:
            return "in_process"
        backend = self.config.actor_rollout_ref.rollout.checkpoint_engine.backend
        return backend if backend != "auto" else "nccl" if self.device_name == "cuda" else "naive"

    def close(self) -> None:
        """Shut down the workers."""
        if self.agent_workers is not None:
            self.agent_workers.close()
        for group in self._groups.values():
            group.shutdown()
        self._groups, self._processes = {}, []
        self.resource_pool_manager.shutdown()

    def _role_classes(self) -> dict[Role, ClassWithInitArgs]:
        config, device, workers = self.config, self.device_name, self.role_worker_mapping
        policy, critic = config.actor_rollout_ref, config.critic
        actor = self._with_schedule_length(policy.actor, self.total_training_steps - self.critic_warmup)
        if "sum_pi_squared" in required_inputs(config.algorithm.adv_estimator):
            actor = replace(actor, calculate_sum_pi_squared=True)
        policy = replace(policy, actor=actor)
        sections: dict[Role, Any] = {
            Role.Critic: self._with_schedule_length(critic, self.total_training_steps),
            Role.RewardModel: config.reward_model,
        }
        return {
            role: self.class_with_init(worker, config=sections[role], device=device)
            if role in sections
            else self.class_with_init(worker, config=policy, role=str(role), device=device)
            for role, worker in workers.items()
        }

    def _with_schedule_length(self, section: Any, num_steps: int) -> Any:
        """The section with its schedule length set to the number of its update steps, unless the user set one."""
        if section.optim.total_training_steps > 0:
            return section
        return replace(section, optim=replace(section.optim, total_training_steps=max(1, num_steps)))

    def start(self, resume_from: Path | None = None) -> None:
        """Lock the run's folder, resume from its checkpoint and open the trackers.

        resume_from: the checkpoint to resume from, overriding the config.
        """
        config = self.config.trainer
        with ExitStack() as closing:
            closing.enter_context(RunLock(self.run_dir))
            self.checkpoints.clean_stale()
            saved_metrics = self._load_checkpoint(resume_from)
            if self.train_dataloader is not None:
                self.train_dataloader.check_state()
                self.loader_state = deepcopy(self.train_dataloader.state_dict())
            if self.weight_sync is not None:
                self.weight_sync.run(self.num_updates)
            if not config.val_only:
                closing.callback(self.source.close)
                self.source.start(self.run_dir, self.global_steps, self.num_updates, self.last_checkpoint)
            trains = not config.val_only and self.global_steps < self.total_training_steps
            write_run_config(self.run_dir, self.config, self.global_steps, trains)
            self.tracking = Tracking(
                project_name=config.project_name,
                experiment_name=config.experiment_name,
                default_backend=config.logger,
                config=as_written(self.config),
                run_dir=self.run_dir,
                total_steps=None if config.val_only else self.total_training_steps,
                start_step=None if config.val_only else self.global_steps,
            )
            closing.callback(self.tracking.finish)
            timeline_dir = None if config.val_only else self.run_dir
            closing.push(self.profiler.start(timeline_dir, self.global_steps, self._processes))
            if (self.tracking.last_step or 0) < self.global_steps:
                self.tracking.log(data=saved_metrics, step=self.global_steps)
            self._closing = closing.pop_all()
        self._log_summary()

    def _log_summary(self) -> None:
        config, roles = self.config, ["actor", "rollout"]
        if config.trainer.val_only:
            logger.info("validating %s on %s", config.actor_rollout_ref.model.path, self.device_name)
            logger.info("output folder: %s", self.run_dir)
            return
        reference = "reference (adapters off)" if config.actor_rollout_ref.model.lora_rank else "reference"
        roles += [reference] * self.use_reference_policy + ["critic"] * self.use_critic + ["reward model"] * self.use_rm
        logger.info(
            "%s: %d prompts x %d samples per step, %d steps (%d per epoch) on %s; %s of %s",
            config.algorithm.adv_estimator,
            config.data.train_batch_size,
            config.actor_rollout_ref.rollout.n,
            self.total_training_steps,
            len(self.train_dataloader),
            self.device_name,
            ", ".join(roles),
            config.actor_rollout_ref.model.path,
        )
        if (mode := config.trainer.async_mode) is not None:
            logger.info("asynchronous training: %s, at most %d update(s) behind", mode, self.max_staleness)
        if self.resource_pool_manager.get_n_gpus() > 1:
            logger.info("workers: %s", self._layout())
        logger.info("output folder: %s", self.run_dir)
        warn_if_epochs_end_first(config, self.total_training_steps)
        warn_if_on_cpu(config, self.device_name, self.resource_pool_manager.get_n_gpus())

    def _layout(self) -> str:
        """Each pool with its processes per machine and its roles, and the actor's sequence parallel size."""
        manager = self.resource_pool_manager
        roles = {
            pool: [str(role) for role, own in manager.mapping.items() if own == pool]
            for pool in manager.mapping.values()
        }
        pools = [f"{pool} {manager.resource_pool_spec[pool]} {', '.join(names)}" for pool, names in roles.items()]
        sequence_ranks = sequence_parallel_size(self.config.actor_rollout_ref.actor)
        return "; ".join(pools) + (f"; {sequence_ranks} ranks per sequence" if sequence_ranks > 1 else "")

    def fit(self, interrupt: Interrupt | None = None) -> int:
        """Train to the last step. Returns 0, or 130 if the run was stopped.

        interrupt: records stop requests; by default from Ctrl-C and SIGTERM.
        """
        if self._closing is None:
            self.start()
        assert self._closing is not None
        with self._closing, interrupt or Interrupt() as entered:
            return self._run(entered)

    def _run(self, interrupt: Interrupt) -> int:
        config = self.config.trainer
        if self._can_validate and (config.val_only or (config.val_before_train and self.global_steps == 0)):
            with span("testing"):
                self._log(self._validate(), interrupt)
        if config.val_only:
            return 0
        if self.global_steps >= self.total_training_steps:
            logger.info(
                "nothing to do: the run is already at step %d of %d", self.global_steps, self.total_training_steps
            )
            return 0
        prompts = self._prompts(interrupt)
        unsaved: dict[str, Any] = {}  # metrics of the last complete step, if it is not saved
        while self.global_steps < self.total_training_steps:
            self.global_steps += 1
            is_last = self.global_steps == self.total_training_steps
            timing: dict[str, float] = {}
            with self.profiler.step(self.global_steps), marked_timer("step", timing):
                try:
                    if interrupt.requested:
                        raise StopRequested
                    batch, metrics = self._train_step(prompts, timing)
                except StopRequested:
                    return self._stopped_mid_step(unsaved, interrupt)
                self.train_dataloader.on_batch_end(forks.conversations(batch))
                self.loader_state = deepcopy(self.train_dataloader.state_dict())
                if self._can_validate and self._is_due(config.test_freq, is_last):
                    with marked_timer("testing", timing):
                        metrics |= self._validate()
            metrics |= self._step_metrics(batch, timing)
            stopping = interrupt.requested and not is_last
            unsaved = metrics
            if stopping or (is_last and config.save_freq != 0) or self._is_due(config.save_freq, is_last):
                with marked_timer("save_checkpoint", timing):
                    self._save_checkpoint(metrics)
                metrics["timing_s/save_checkpoint"] = timing["save_checkpoint"]
                unsaved = {}
            self._log(metrics, interrupt)
            if stopping:
                return self._stopped(interrupt)
        logger.info("done: %d steps; output folder: %s", self.global_steps, self.run_dir)
        return 0

    def _log(self, metrics: dict[str, Any], interrupt: Interrupt) -> None:
        self.tracking.log(data=metrics, step=self.global_steps)
        if self.on_step is not None and self.on_step(self.global_steps, metrics):
            interrupt.stop(by="a callback")

    def _stopped_mid_step(self, unsaved: dict[str, Any], interrupt: Interrupt) -> int:
        """Discard the step. unsaved: metrics of the last complete step, which is then saved; empty if it already is."""
        self.global_steps -= 1
        if self.source.keeps_prompts:
            self.loader_state = deepcopy(self.train_dataloader.state_dict())
        if unsaved:
            self._save_checkpoint(unsaved)
        return self._stopped(interrupt)

    def _stopped(self, interrupt: Interrupt) -> int:
        logger.warning("stopped by %s after step %d; run the same command to resume", interrupt.by, self.global_steps)
        return 130

    def _is_due(self, frequency: int, is_last: bool) -> bool:
        return frequency > 0 and (is_last or self.global_steps % frequency == 0)

    def _prompts(self, interrupt: Interrupt) -> Iterator[DataProto]:
        """Batches of prompts, epoch after epoch; raises StopRequested, before it draws another, if a stop was requested."""
        while True:
            self.epoch = self.train_dataloader.epoch
            for batch_dict in self.train_dataloader:
                yield DataProto.from_single_dict(batch_dict)
                if interrupt.requested:
                    raise StopRequested

    def _train_step(self, prompts: Iterator[DataProto], timing: dict[str, float]) -> tuple[DataProto, dict[str, Any]]:
        """One step of the algorithm as a list of calls."""
        correction = self.config.algorithm.rollout_correction
        metrics: dict[str, Any] = {}

        # 1. and 2. generate and reward
        batch, sampling_metrics = self.source.collect(prompts, step=self.global_steps, timing=timing)
        self.cut_responses.note(batch)
        self.failed_conversations.note(batch)
        batch = forks.add_rows(batch, self.config.actor_rollout_ref.rollout, self.tokenizer.pad_token_id)
        check_policy_version(batch, self.num_updates, self.max_staleness)
        metrics |= sampling_metrics | self._seqlen_metrics(batch)

        # 3. and 4. log-probs of policy and reference, and values; concurrent if their workers are separate
        calls = {"ref": (self.ref_policy_wg, "ref", "compute_ref_log_prob")} if self.use_reference_policy else {}
        source = self._old_log_probs_source(forks.num_conversations(batch))
        if source == "pass":
            calls = {"old_log_prob": (self.actor_rollout_wg, "actor", "compute_log_prob")} | calls
        if self.use_critic:
            calls["values"] = (self.critic_wg, "critic", "compute_values")
        batch = self._with_outputs(use_rollout_log_probs(batch) if source == "rollout" else batch, calls, timing)
        corrected = correction.rollout_is is not None or correction.rollout_rs is not None
        corrected |= self.max_staleness > 0 or has_cut_log_probs(self.config.actor_rollout_ref.rollout)
        if source == "pass":
            metrics |= self._entropy_metrics(batch) | rollout_gap(batch, self.gap_bound, corrected=corrected)

        # 5. advantages, on the controller
        with marked_timer("adv", timing):
            batch, chosen, adv_metrics = self._advantages(batch)
        metrics |= adv_metrics
        self.idle_steps.note(batch)
        check_finite(batch, "old_log_probs", "ref_log_prob", "values", "token_level_rewards", "advantages", "returns")

        # 6. and 7. update the critic and, after critic_warmup, the actor; without an old log-prob pass the update audits log-probs
        chosen.meta_info["rollout_gap"] = "none" if source == "pass" else "report" if corrected else "check"
        metrics |= self._update(chosen, timing)

        if (folder := self.config.trainer.rollout_data_dir) is not None:
            self._dump_responses(self._responses([forks.conversations(batch)]), folder)
        return batch, metrics

    def _old_log_probs_source(self, num_samples: int) -> OldLogProbs:
        actor = self.config.actor_rollout_ref.actor
        is_one_update = (
            self.global_steps > self.critic_warmup
            and actor.ppo_epochs == 1
            and num_samples <= actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        )
        return old_log_probs_source(self.config, is_one_update=is_one_update)

    def _advantages(self, batch: DataProto) -> tuple[DataProto, DataProto, dict[str, Any]]:
        """KL penalty, rollout correction, advantages: (the batch, the rows to train on, metrics)."""
        algorithm = self.config.algorithm
        metrics: dict[str, Any] = {}
        rows = forks.joined(batch)
        if algorithm.use_kl_in_reward:
            rows, metrics = apply_kl_penalty(rows, self.kl_ctrl_in_reward, algorithm.kl_penalty)
        else:
            rows.tensors["token_level_rewards"] = rows.tensors["token_level_scores"]
        all_tokens = rows.tensors["response_mask"]
        rows, correction_metrics = apply_rollout_correction(rows, algorithm.rollout_correction)
        # rejected tokens have no loss, but their reward still belongs to the tokens before them
        kept_tokens, rows.tensors["response_mask"] = rows.tensors["response_mask"], all_tokens
        rows = compute_advantage(
            rows,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        rows.tensors["response_mask"] = kept_tokens
        batch = forks.split(batch, rows)
        chosen = batch
        if algorithm.use_pf_ppo:
            rule = algorithm.pf_ppo
            chosen = forks.choose(batch, pf_ppo_rows(rows, rule.reweight_method, rule.weight_pow, self.global_steps))
        return batch, chosen, metrics | correction_metrics

    def _with_outputs(
        self, batch: DataProto, calls: dict[str, tuple[Any, str, str]], timing: dict[str, float]
    ) -> DataProto:
        """The batch with the outputs of forward passes. calls: timer name to (worker group, mesh, method)."""
        if not calls:
            return batch
        inputs = batch.select(["input_ids", "attention_mask", "position_ids", "responses", "response_mask"], [])
        waiting = {}
        for name, (group, mesh, method) in calls.items():
            with marked_timer(name, timing):
                parts = group.mesh(mesh).dp_size if self.config.trainer.balance_batch else 1
                waiting[name] = call_balanced(getattr(group, method), inputs, parts)
        for name, outputs in waiting.items():
            with marked_timer(name, timing):
                batch = batch.union(outputs())
        return batch

    def _update(self, batch: DataProto, timing: dict[str, float]) -> dict[str, float]:
        """Update the critic and the actor, concurrently if their workers are separate."""
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        n, step = self.config.actor_rollout_ref.rollout.n, self.global_steps
        waiting = {}
        if self.use_critic:
            with marked_timer("update_critic", timing):
                rule = mini_batches_of(critic, n, step)
                waiting["update_critic"] = self.critic_wg.update_critic(
                    self._laid_out(batch, rule, self.critic_wg.mesh("critic").dp_size)
                )
        if self.global_steps > self.critic_warmup:
            with marked_timer("update_actor", timing):
                rule = mini_batches_of(actor, n, step, loss_preparation(actor, step))
                waiting["update_actor"] = self.actor_rollout_wg.update_actor(
                    self._laid_out(batch, rule, self.actor_rollout_wg.mesh("actor").dp_size)
                )
            self.num_updates += 1
        metrics: dict[str, float] = {}
        for name, output in waiting.items():
            with marked_timer(name, timing):
                metrics |= reduced_over_ranks(output.get().meta_info["metrics"])
        if "update_actor" in waiting:
            with marked_timer("update_weights", timing) if self.weight_sync is not None else nullcontext():
                metrics |= self.source.update_weights(self.num_updates)
        return metrics

    def _laid_out(self, batch: DataProto, rule: MiniBatches, dp_size: int) -> DataProto:
        return lay_out(batch, rule, dp_size, balance=self.config.trainer.balance_batch)

    def _seqlen_metrics(self, batch: DataProto) -> dict[str, float]:
        """Imbalance of tokens between ranks, before and after balancing."""
        lengths: list[int] = batch.tensors["attention_mask"].sum(-1).tolist()
        batch.meta_info["global_token_num"] = lengths
        parts = spread(lengths, self.actor_rollout_wg.mesh("actor").dp_size, balance=True)
        return log_seqlen_unbalance(lengths, [part for part in parts if part], prefix="global_seqlen")

    def _entropy_metrics(self, batch: DataProto) -> dict[str, float]:
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        entropy = agg_loss(batch.tensors["entropys"], batch.tensors["response_mask"], mode)
        return {"actor/entropy": float(entropy)}

    def _step_metrics(self, batch: DataProto, timing: dict[str, float]) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            "training/global_step": self.global_steps,
            "training/epoch": self.epoch,
        }
        samples = forks.conversations(batch)
        metrics |= extra_metrics(samples) | compute_data_metrics(samples, use_critic=self.use_critic)
        metrics |= compute_timing_metrics(batch, timing)
        metrics |= compute_throughout_metrics(batch, timing, n_gpus=self.resource_pool_manager.get_n_gpus())
        return metrics

    @property
    def _can_validate(self) -> bool:
        return self.val_reward_fn is not None and self.val_dataset is not None

    def _validate(self) -> dict[str, float]:
        with phase("validation"), self.source.idle():
            return self._validation_metrics()

    def _validation_metrics(self) -> dict[str, float]:
        assert self.val_reward_fn is not None and self.val_dataset is not None
        data, num_rows = self.config.data, len(self.val_dataset)
        batch_size, n = data.val_batch_size or num_rows, self.config.actor_rollout_ref.rollout.val_kwargs.n
        val_reward_fn = FailureLimit(self.val_reward_fn, n * min(batch_size, num_rows))
        shuffled = shuffled_order(num_rows, self.config.trainer.seed, epoch=0) if data.validation_shuffle else None
        batches = prompt_batches(self.val_dataset, shuffled or range(num_rows), batch_size, self.collate_fn)

        def scored() -> Iterator[DataProto]:
            for rows, prompts in batches:
                batch = self.sampling.generate_for_validation(prompts, rows, step=self.global_steps)
                yield self.sampling.score(batch, val_reward_fn)

        responses, config = self._responses(scored()), self.config.trainer
        if config.validation_data_dir is not None:
            self._dump_responses(responses, config.validation_data_dir)
        if config.log_val_generations > 0:
            rows = list(zip(responses.inputs, responses.outputs, responses.scores))[: config.log_val_generations]
            self.tracking.log_table("val/generations", ["input", "output", "score"], rows, self.global_steps)
        return responses.metrics()

    def _responses(self, batches: Iterable[DataProto]) -> Responses:
        responses = Responses()
        for batch in batches:
            responses.add(batch, self._decode)
        return responses

    def _decode(self, rows: list[torch.Tensor]) -> list[str]:
        return decode_all(self.tokenizer, [row.tolist() for row in rows])

    def _dump_responses(self, responses: Responses, folder: str) -> None:
        dump_generations(
            responses.inputs,
            responses.outputs,
            responses.ground_truths,
            responses.scores,
            responses.dumped_details,
            responses.extra,
            folder,
            self.global_steps,
        )

    def _checkpoints_to_keep(self) -> int | None:
        limits = (self.config.trainer.max_actor_ckpt_to_keep, self.config.trainer.max_critic_ckpt_to_keep)
        return None if None in limits else max(n for n in limits if n is not None)

    def _save_checkpoint(self, metrics: dict[str, Any]) -> None:
        """metrics: those of the step, saved in case the process dies before they are tracked."""

        def write(folder: Path) -> None:
            for name in ("actor", "critic") if self.use_critic else ("actor",):
                (folder / name).mkdir()
            self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), self.global_steps)
            if self.use_critic:
                self.critic_wg.save_checkpoint(str(folder / "critic"), self.global_steps)
            save_state(folder / "data", self.loader_state, owner="the data loader")
            self.source.save(folder)
            state = {
                "global_steps": self.global_steps,
                "num_updates": self.num_updates,
                "kl_ctrl": self.config.algorithm.kl_ctrl.type,
                "metrics": metrics,
            }
            save_state(folder / "trainer_state", state | {"kl_coef": self.kl_ctrl_in_reward.value}, owner="the trainer")
            (folder / CONFIG).write_text(as_yaml(self.config))

        self.tracking.sync()
        self.last_checkpoint = self.checkpoints.save(self.global_steps, write)
        self.source.saved(self.global_steps)
        logger.info("saved %s", self.last_checkpoint)

    def _load_checkpoint(self, resume_from: Path | None) -> dict[str, Any]:
        """Resume from the given checkpoint or the configured one; returns the metrics of its step."""
        config = self.config.trainer
        mode, path = ("resume_path", str(resume_from)) if resume_from else (config.resume_mode, config.resume_from_path)
        found = self.checkpoints.find(mode, path)
        if found is None:
            if config.resume_mode == "disable" and list(self.run_dir.glob("global_step_*")):
                logger.warning("%s has checkpoints of an earlier run, which are kept", self.run_dir)
            elif mode == "auto":
                self.checkpoints.mend_tracker(None)
            return {}
        self.global_steps, folder = found
        saved = saved_config(folder)
        if config.resume_mode == "auto":
            check_same_experiment(self.run_dir, self.config, saved)
        if mode == "auto":
            self.checkpoints.mend_tracker(self.global_steps)
        self.last_checkpoint = folder
        logger.info("resuming from %s", folder)
        if not config.val_only:
            report_changes(saved, self.config, folder)
        state = load_state(folder / "trainer_state")
        self.num_updates = state.get("num_updates", max(0, self.global_steps - self.critic_warmup))
        if self.use_critic:
            self.critic_wg.load_checkpoint(str(folder / "critic"))
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"), self.num_updates)
        if self.train_dataloader is not None:
            self.train_dataloader.load_state_dict(load_state(folder / "data"))
        if state.get("kl_ctrl", "adaptive") == self.config.algorithm.kl_ctrl.type == "adaptive":
            self.kl_ctrl_in_reward.value = state["kl_coef"]
        metrics: dict[str, Any] = state["metrics"]
        return metrics
