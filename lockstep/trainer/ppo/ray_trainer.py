"""The PPO loop: a plain Python loop on the controller; every arrow is a call on a worker group.

    prompts ─► generate ─► reward ─► old log-probs ─► ref log-probs ─► values ─► advantage ─► update critic ─► update actor

If a step is a single update, its own log-probs are the old ones, and the old log-prob pass is skipped.

One `DataProto` passes through all stages and gains keys (`protocol/keys.py`). The loop does not depend on whether a worker group is
in this process or on many machines.
"""

import logging
from collections.abc import Iterator, Sized
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lockstep.algorithms.kl import get_kl_controller
from lockstep.algorithms.losses.policy import with_loss_settings
from lockstep.algorithms.rollout_correction import use_rollout_log_probs
from lockstep.config.actor_rollout_ref import max_expected_gap
from lockstep.config.batch_sizes import fitted_to_rows
from lockstep.config.checks import SEPARATE
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.config.old_log_probs import OldLogProbs
from lockstep.config.placement import controller_of, need_critic, need_reference_policy
from lockstep.config.ppo import PPOConfig
from lockstep.data.loader import create_train_loader
from lockstep.protocol import DataProto
from lockstep.single_controller import Role
from lockstep.trainer.ppo import forks
from lockstep.trainer.ppo.audit import StepAudit, is_gap_expected, max_staleness
from lockstep.trainer.ppo.data_order import DrawnPrompts
from lockstep.trainer.ppo.metrics import (
    compute_balance_metrics,
    compute_data_metrics,
    compute_entropy_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from lockstep.trainer.ppo.reward_probe import RewardProbe
from lockstep.trainer.ppo.rollout_repair import RolloutRepair
from lockstep.trainer.ppo.rollout_sources import create_source
from lockstep.trainer.ppo.round_trip import RoundTrip
from lockstep.trainer.ppo.run_summary import log_summary
from lockstep.trainer.ppo.sampling import RewardFn, Sampling, extra_metrics
from lockstep.trainer.ppo.step_advantages import add_advantages, check_estimator
from lockstep.trainer.ppo.token_dump import TokenDump
from lockstep.trainer.ppo.validation import Responses, validate
from lockstep.trainer.ppo.worker_calls import (
    Pass,
    Trained,
    critic_warmup,
    forward_passes,
    old_log_probs_of,
    update_models,
)
from lockstep.trainer.ppo.worker_groups import WorkerGroups, compute_dtype, create_sampling, create_weight_sync
from lockstep.trainer.run.interrupt import Interrupt, OnStep, StopRequested
from lockstep.trainer.run.memory_check import with_chosen_sizes
from lockstep.trainer.run.observer import StepObserver
from lockstep.trainer.run.preemption import Patience
from lockstep.trainer.run.smaller_micro_batches import SmallerMicroBatches
from lockstep.trainer.run.step_profiler import StepProfiler, profiled_roles
from lockstep.trainer.run.training_run import LOADER_STATE, TRAINER_STATE, TrainingRun, num_training_steps
from lockstep.utils import step_stop
from lockstep.utils.audit import Audits
from lockstep.utils.main_thread import taking_calls
from lockstep.utils.progress import phase
from lockstep.utils.rollout_gap import GapBound
from lockstep.utils.spans import span
from lockstep.utils.state_file import load_state
from lockstep.utils.timing import marked_timer

logger = logging.getLogger(__name__)
ROLLOUT_STATE = "rollout"
"""Folder of a checkpoint with what rollout engines keep between steps."""


class PPOTrainer:
    """Trains a policy by PPO, GRPO or any other registered advantage estimator.

    workers:   the worker groups, which `init_workers` starts.
    reward_fn: scores training rollouts; val_reward_fn those of validation (None: no validation).
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        workers: WorkerGroups,
        reward_fn: RewardFn | None = None,
        val_reward_fn: RewardFn | None = None,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
    ) -> None:
        if (train_dataset is None and not config.trainer.val_only) or reward_fn is None:
            raise ValueError("PPOTrainer needs train_dataset (unless trainer.val_only=true) and reward_fn")
        if train_dataset is not None:
            config = fitted_to_rows(config, len(cast(Sized, train_dataset)))
        config = with_chosen_sizes(config, workers.device)
        self.config = config
        self.tokenizer = tokenizer
        self.workers = workers
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.val_dataset, self.collate_fn = val_dataset, collate_fn
        self.use_critic = need_critic(config)
        self.critic_warmup = critic_warmup(config)
        self.use_reference_policy = need_reference_policy(config)
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        if train_dataset is not None:
            check_estimator(config)
        with_loss_settings(config.actor_rollout_ref.actor)
        self.train_dataloader: Any = None
        if train_dataset is not None:
            self.train_dataloader = create_train_loader(config, train_dataset, train_sampler, collate_fn)
        self.total_training_steps = num_training_steps(config, len(self.train_dataloader or ()))
        self.global_steps = 0
        self.epoch = 0
        self.num_updates = 0
        self.loader_state: dict[str, Any] = {}
        """State of the data loader after the last complete step: the one that checkpoints save."""
        self.run = TrainingRun(config)
        self.smaller = SmallerMicroBatches(config)
        self.audits = Audits(asdict(config.trainer.audit))
        rollout = config.actor_rollout_ref.rollout
        self.audit = StepAudit(
            self.audits,
            GapBound(compute_dtype(config, workers.device), exact=rollout.exact, largest=max_expected_gap(rollout)),
            self.run.folder,
            DrawnPrompts(config, self.train_dataloader),
            RoundTrip(config, tokenizer, workers.agents, train_dataset),
            RewardProbe(config, reward_fn),
            self._write_rows,
        )
        roles = profiled_roles(config, map(str, workers.roles))
        self.profiler = StepProfiler(config, roles, self.total_training_steps, workers.device)
        self.on_step: OnStep | None = None
        self.observer = StepObserver()
        self.untested: dict[str, Any] | None = None
        """Metrics of the checkpoint's step, if there was no time for its validation; they are not tracked yet."""

    def fit(self, interrupt: Interrupt | None = None) -> int:
        """Train to the last step. Returns 0, or 130 if the run was stopped.

        interrupt: records stop requests; by default from Ctrl-C and SIGTERM.
        """
        if not self.run.is_open:
            self.start()
        with self.run, interrupt or Interrupt(self.config.trainer.preemption_grace_s) as entered, taking_calls():
            if entered.grace_s is not None:
                entered.patience = Patience(entered.grace_s)
            return self._loop(entered)

    def _loop(self, interrupt: Interrupt) -> int:
        run = self.run
        last_step = self.total_training_steps
        can_validate = self.val_reward_fn is not None and self.val_dataset is not None
        if not self._validate_first(can_validate, interrupt):
            return run.stopped(self.global_steps, interrupt.by)
        if self.config.trainer.val_only:
            return 0
        if self.global_steps >= last_step:
            run.log_nothing_to_do(self.global_steps, last_step)
            return 0
        prompts = self._prompts(interrupt)
        unsaved: dict[str, Any] = {}  # metrics of the last complete step, if it is not saved
        while self.global_steps < last_step:
            self.global_steps += 1
            timing: dict[str, float] = {}
            with self.profiler.step(self.global_steps), marked_timer("step", timing):
                self._mark_rollout()
                try:
                    with interrupt.step(), self.audit.step(self.global_steps, self.num_updates, run.last_checkpoint):
                        batch, metrics = self._train_step(prompts, timing)
                except StopRequested:
                    return self._stopped_mid_step(unsaved, interrupt)
                self.train_dataloader.on_batch_end(forks.conversations(batch))
                self.loader_state = deepcopy(self.train_dataloader.state_dict())
                tested: dict[str, float] | None = {}
                if can_validate and run.must_test(self.global_steps, last_step):
                    self._mark_rollout()
                    with marked_timer("testing", timing):
                        tested = self._validated(interrupt)
            metrics |= (tested or {}) | self._step_metrics(batch, timing)
            metrics |= self.audit.log()
            if tested is None:
                self._save_checkpoint(metrics, is_tested=False, discards=True)
                return run.stopped(self.global_steps, interrupt.by)
            stopping = interrupt.requested and self.global_steps < last_step
            unsaved = metrics
            if stopping or run.must_save(self.global_steps, last_step):
                with marked_timer("save_checkpoint", timing):
                    self._save_checkpoint(metrics)
                metrics["timing_s/save_checkpoint"] = timing["save_checkpoint"]
                unsaved = {}
            if interrupt.patience is not None:
                interrupt.patience.learn(timing, run.commit_s)
            self._log(metrics, interrupt)
            if stopping:
                return run.stopped(self.global_steps, interrupt.by)
        return run.done(self.global_steps)

    def _prompts(self, interrupt: Interrupt) -> Iterator[DataProto]:
        """Batches of prompts, epoch after epoch; raises StopRequested, before it draws another, if a stop was requested."""
        while True:
            self.epoch = self.train_dataloader.epoch
            for batch_dict in self.train_dataloader:
                batch = DataProto.from_single_dict(batch_dict)
                self.audit.prompts.draw(self.audits, batch)
                yield batch
                if interrupt.requested:
                    raise StopRequested

    def _train_step(self, prompts: Iterator[DataProto], timing: dict[str, float]) -> tuple[DataProto, dict[str, Any]]:
        """One step of the algorithm as a list of calls."""
        config = self.config
        metrics: dict[str, Any] = {}

        # 1. and 2. generate and reward
        batch, sampling_metrics = self.source.collect(prompts, step=self.global_steps, timing=timing)
        self.audit.check_samples(batch)
        batch = forks.add_rows(batch, config.actor_rollout_ref.rollout, self.tokenizer.pad_token_id)
        self.audit.check_versions(batch, self.num_updates, max_staleness(config))
        metrics |= sampling_metrics | compute_balance_metrics(batch, self.actor_rollout_wg.mesh("actor").dp_size)

        # 3. and 4. log-probs of policy and reference, and values; concurrent if their workers are separate
        old_log_probs = old_log_probs_of(batch, config, self.global_steps)
        if old_log_probs == "rollout":
            batch = use_rollout_log_probs(batch)
        groups: dict[Pass, Any] = {
            "old_log_prob": self.actor_rollout_wg if old_log_probs == "pass" else None,
            "ref": self.ref_policy_wg if self.use_reference_policy else None,
            "values": self.critic_wg if self.use_critic else None,
        }
        batch = forward_passes(batch, groups, config, timing, self.audits)
        gap_is_expected = is_gap_expected(config)
        if old_log_probs == "pass":
            metrics |= compute_entropy_metrics(batch, config.actor_rollout_ref.actor.loss_agg_mode)
            metrics |= self.audit.check_gap(batch, is_expected=gap_is_expected)

        # 5. advantages, on the controller; they adapt the KL coefficient, so the step can no longer be discarded
        step_stop.commit()
        with marked_timer("adv", timing):
            batch, chosen, adv_metrics = add_advantages(batch, config, self.kl_ctrl_in_reward, self.global_steps)
        metrics |= adv_metrics
        self.audit.check_advantages(batch)

        # 6. and 7. update the critic and, after critic_warmup, the actor; without an old log-prob pass the update audits log-probs
        chosen.meta_info["rollout_gap"] = (
            "none" if old_log_probs == "pass" else "report" if gap_is_expected else "check"
        )
        self.observer.updating(self, chosen)
        metrics |= self._update(chosen, timing) | self._out_of_memory_metrics()
        self.observer.updated(self, batch)

        if (folder := config.trainer.rollout_data_dir) is not None:
            with marked_timer("dump_rollouts", timing):
                self._dump(batch, folder, old_log_probs)
        return batch, metrics

    def _write_rows(self, batch: DataProto, folder: Path) -> None:
        """The responses of a batch that an audit keeps."""
        if {"data_source", "reward_model"} <= batch.non_tensor_batch.keys():  # a dataset of the user may lack them
            Responses.of([forks.conversations(batch)], self.tokenizer).dump(str(folder), self.global_steps)

    def _dump(self, batch: DataProto, folder: str, old_log_probs: OldLogProbs) -> None:
        """Write the step's responses and, if the config asks for them, their tokens."""
        tokens = TokenDump.asked_for(self.config.trainer, self.tokenizer, old_log_probs)
        Responses.of([forks.conversations(batch)], self.tokenizer, tokens).dump(folder, self.global_steps)
        tokens.write(folder, self.global_steps)

    def _update(self, batch: DataProto, timing: dict[str, float]) -> dict[str, float]:
        """Update the critic and, after critic_warmup, the actor and the rollout's weights."""
        updates_actor = self.global_steps > self.critic_warmup
        groups: dict[Trained, Any] = {
            "critic": self.critic_wg if self.use_critic else None,
            "actor": self.actor_rollout_wg if updates_actor else None,
        }
        batch.meta_info["audit"] = self.audits.levels
        metrics = update_models(batch, groups, self.config, self.global_steps, timing, self.audits)
        if updates_actor:
            self.num_updates += 1
            with marked_timer("update_weights", timing) if self.weight_sync is not None else nullcontext():
                metrics |= self.source.update_weights(self.num_updates)
        return metrics

    def _step_metrics(self, batch: DataProto, timing: dict[str, float]) -> dict[str, Any]:
        samples = forks.conversations(batch)
        agents = self.workers.agent_workers
        replaced = agents.num_replaced if agents is not None else 0
        self.repair.step_is_complete()
        counts = {"training/agent_workers_replaced": replaced, "training/rollout_repairs": self.repair.count}
        return {name: count for name, count in counts.items() if count} | {
            "training/global_step": self.global_steps,
            "training/epoch": self.epoch,
            **extra_metrics(samples),
            **compute_data_metrics(samples, use_critic=self.use_critic),
            **compute_timing_metrics(batch, timing),
            **compute_throughout_metrics(batch, timing, n_gpus=self.workers.count),
        }

    def _out_of_memory_metrics(self) -> dict[str, float]:
        """What the workers' engines had to lower; several ranks lower nothing by themselves (`TaskRunner`)."""
        for group in self._computing_groups():
            if group.world_size == 1:
                self.smaller.note(group.lowered_micro_batches()[0])
        return self.smaller.metrics()

    def _computing_groups(self) -> list[Any]:
        """The groups with training engines; a user's class may not be able to lower its micro-batches."""
        groups = {id(g): g for g in (self.actor_rollout_wg, self.ref_policy_wg, self.critic_wg, self.rm_wg)}
        return [group for group in groups.values() if hasattr(group, "lowered_micro_batches")]

    def _validate_first(self, can_validate: bool, interrupt: Interrupt) -> bool:
        """The validation before training, or the one that the checkpoint's step still needs; False if there is no time for it."""
        config = self.config.trainer
        earlier = None if config.val_only else self.untested
        is_due = config.val_only or (config.val_before_train and self.global_steps == 0)
        if earlier is None and not (can_validate and is_due):
            return True
        with span("testing"):
            tested = self._validated(interrupt) if can_validate else {}
        if tested is None:
            return False
        self._log((earlier or {}) | tested, interrupt)
        self.untested = None
        return True

    def _validated(self, interrupt: Interrupt) -> dict[str, float] | None:
        """The metrics of a validation; None if `trainer.preemption_grace_s` leaves no time for it."""
        try:
            with interrupt.validation():
                return self._validate()
        except StopRequested:
            return None

    def _validate(self) -> dict[str, float]:
        with phase("validation"):
            return self.source.repairing(self._validate_now)

    def _validate_now(self) -> dict[str, float]:
        assert self.val_reward_fn is not None
        with self.source.idle():
            return validate(
                self.config,
                self.sampling,
                self.val_reward_fn,
                self.val_dataset,
                self.collate_fn,
                self.tokenizer,
                self.run.tracking,
                self.global_steps,
            )

    def _log(self, metrics: dict[str, Any], interrupt: Interrupt) -> None:
        self.run.log(metrics, self.global_steps)
        if self.on_step is None:
            return
        with phase("callback"):
            is_stopped = self.on_step(self.global_steps, metrics)
        if is_stopped:
            interrupt.stop(by="a callback")

    def _stopped_mid_step(self, unsaved: dict[str, Any], interrupt: Interrupt) -> int:
        """Discard the step. unsaved: metrics of the last complete step, which is then saved; empty if it already is."""
        self.global_steps -= 1
        if self.source.keeps_prompts:
            self.loader_state = deepcopy(self.train_dataloader.state_dict())
        if unsaved:
            self._save_checkpoint(unsaved, discards=True)
        return self.run.stopped(self.global_steps, interrupt.by)

    def init_workers(self) -> None:
        """Start the workers and load the models."""
        self.workers.start(self.config, self.total_training_steps)
        self._use_groups()

    def _use_groups(self) -> None:
        """Build on the worker groups, whose models are loaded: sampling, weight updates, the source of samples."""
        workers = self.workers
        self.actor_rollout_wg = workers.group(Role.ActorRollout, Role.Actor)
        self.rollout_wg = workers.group(Role.ActorRollout, Role.Rollout)
        has_adapters = self.config.actor_rollout_ref.model.lora_rank > 0
        self.ref_policy_wg = self.actor_rollout_wg if has_adapters else workers.group(Role.RefPolicy)
        self.critic_wg = workers.group(Role.Critic)
        self.rm_wg = workers.group(Role.RewardModel)
        if self.rm_wg is not None and hasattr(self.rm_wg, "check_tokenizer"):  # a user's class may not have it
            self.rm_wg.check_tokenizer(self.tokenizer.get_vocab())
        num_samples = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        self.sampling = self._sampling(workers.responder(self.tokenizer.pad_token_id, num_samples))
        self.weight_sync = create_weight_sync(self.config, workers, self.audits)
        self.source = create_source(self.config, self.sampling, self.weight_sync, self.total_training_steps)
        self.source.repair = self.repair = RolloutRepair(workers, self.weight_sync, self.sampling)
        workers.wait_ready()

    def _sampling(self, rollout: Any) -> Sampling:
        return create_sampling(self.config, rollout, self.rm_wg, self.reward_fn, self.tokenizer.pad_token_id)

    def start(self, resume_from: Path | None = None) -> None:
        """Lock the run's folder, resume from its checkpoint and open the trackers.

        resume_from: the checkpoint to resume from, overriding the config.
        """
        run = self.run
        with ExitStack() as on_error:
            on_error.push(run)
            metrics = self._load_checkpoint(resume_from)
            if self.smaller.sizes:
                for group in self._computing_groups():
                    group.limit_micro_batches(self.smaller.sizes)
            if self.train_dataloader is not None:
                self.train_dataloader.check_state()
                self.loader_state = deepcopy(self.train_dataloader.state_dict())
            if self.weight_sync is not None:
                self.weight_sync.run(self.num_updates)
            if run.trains:
                run.callback(self.source.close)
                self.source.start(run.folder, self.global_steps, self.num_updates, run.last_checkpoint)
                self.audit.prompts.start(self.source)
                self._let_generation_end_early()
            run.open(self.global_steps, self.total_training_steps, None if self.untested is not None else metrics)
            timeline_dir = run.folder if run.trains else None
            run.push(self.profiler.start(timeline_dir, self.global_steps, self.workers.processes))
            on_error.pop_all()
        steps_per_epoch = len(self.train_dataloader or ())
        log_summary(self.config, self.workers, run.folder, self.total_training_steps, steps_per_epoch)
        self.observer.started(self)

    def _let_generation_end_early(self) -> None:
        """With `trainer.preemption_grace_s`, connect the processes that generate, so that they can save in time."""
        if self.config.trainer.preemption_grace_s is None or controller_of(self.config) == "local":
            return
        if not hasattr(self.rollout_wg, "listen_for_stop"):  # a user's class
            return
        from lockstep.single_controller.ray_backend.cluster import own_address

        try:
            line = step_stop.StopLine(own_address())
        except OSError as error:
            logger.warning("generation cannot be ended early after SIGTERM (trainer.preemption_grace_s): %s", error)
            return
        self.run.callback(line.close)
        self.workers.listen_for_stop(line.address)

    def _load_checkpoint(self, resume_from: Path | None) -> dict[str, Any]:
        """Resume from the given checkpoint or the configured one; returns the metrics of its step."""
        found = self.run.claim(resume_from)
        if found is None:
            return {}
        self.global_steps, folder = found
        state = load_state(folder / TRAINER_STATE)
        self.num_updates = state.get("num_updates", max(0, self.global_steps - self.critic_warmup))
        self.smaller.load(state)
        self.audits.counts.update(state.get("audit_counts", {}))
        if self.use_critic:
            self.critic_wg.load_checkpoint(str(folder / "critic"))
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"), self.num_updates)
        if (folder / ROLLOUT_STATE).is_dir() and self._keeps_rollout_state:
            self.rollout_wg.load_rollout(str(folder / ROLLOUT_STATE))
        if self.train_dataloader is not None:
            self.train_dataloader.load_state_dict(load_state(folder / LOADER_STATE))
        if state.get("kl_ctrl", "adaptive") == self.config.algorithm.kl_ctrl.type == "adaptive":
            self.kl_ctrl_in_reward.value = state["kl_coef"]
        self.audit.probe.load(folder)
        metrics: dict[str, Any] = state["metrics"]
        self.untested = None if state.get("is_tested", True) else metrics
        return metrics

    @property
    def _keeps_rollout_state(self) -> bool:
        name = self.config.actor_rollout_ref.rollout.name
        return ROLLOUT_ENGINES.info(name).keeps_state and hasattr(self.rollout_wg, "save_rollout")  # a user's class

    @property
    def _saves_rollout_state(self) -> bool:
        """A rollout that generates during updates cannot be asked."""
        return self._keeps_rollout_state and self.config.trainer.async_mode not in SEPARATE

    def _mark_rollout(self) -> None:
        """Before what may be discarded."""
        if self._saves_rollout_state and not self.source.keeps_prompts:
            self.source.repairing(lambda: self.rollout_wg.mark_rollout())

    def _save_checkpoint(self, metrics: dict[str, Any], is_tested: bool = True, discards: bool = False) -> None:
        """metrics: those of the step. is_tested: False if a validation that is due has still to come.

        discards: what was generated since `_mark_rollout` is generated again after a resume.
        """
        step = self.global_steps
        groups = {"actor": self.actor_rollout_wg} | ({"critic": self.critic_wg} if self.use_critic else {})

        def write(folder: Path) -> None:
            for name in groups:
                (folder / name).mkdir()
            for name, group in groups.items():
                group.save_checkpoint(str(folder / name), step)
            if self._saves_rollout_state:
                (folder / ROLLOUT_STATE).mkdir()
                self.rollout_wg.save_rollout(str(folder / ROLLOUT_STATE), discards)
            self.source.save(folder)
            self.audit.probe.save(folder)

        kl = {"kl_ctrl": self.config.algorithm.kl_ctrl.type, "kl_coef": self.kl_ctrl_in_reward.value}
        state = {"num_updates": self.num_updates, "metrics": metrics} | kl | self.smaller.state()
        state |= {"audit_counts": dict(self.audits.counts)}
        state |= {} if is_tested else {"is_tested": False}
        self.run.save(step, write, self.loader_state, state)
        if self.config.trainer.async_mode is not None:  # the journal builds on a checkpoint that is complete
            self.run.finish_saving()
        self.source.saved(step)

    def close(self) -> None:
        """Shut down the workers, those of rewards too."""
        for manager in (self.reward_fn, self.val_reward_fn):
            close = getattr(manager, "close", None)  # a user's class may not have it
            if close is not None:
                close()
        self.workers.close()
