"""Builds a training run from its config: workers, pools, tokenizer, rewards, data, trainer."""

import gc
import logging
from collections.abc import Callable, Iterable, Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from lockstep.agents.agents import Agents
from lockstep.config.placement import (
    Pools,
    controller_of,
    need_critic,
    need_reference_model,
    need_reward_model,
    needed_models,
    pools_of,
)
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import with_values
from lockstep.data.create_dataset import create_rl_dataset
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.sampler import create_rl_sampler
from lockstep.engines.train.micro_batch_limits import failure_of, free_unused
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.rewards.managers import RewardFn, check_scorers, load_reward_manager
from lockstep.single_controller import LOCAL, Backend, HangError, ResourcePoolManager, RestartError, Role, Worker
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.run_agents import agents_for
from lockstep.trainer.ppo.worker_groups import WorkerGroups
from lockstep.trainer.run.errors import RunError, raise_as_run_error
from lockstep.trainer.run.failures import cause_of, how_to_resume
from lockstep.trainer.run.hang_exit import EXIT_CODE, set_exit_code
from lockstep.trainer.run.inputs import tokenizer_arguments
from lockstep.trainer.run.interrupt import Interrupt, OnStep
from lockstep.trainer.run.restarts import Restarts
from lockstep.trainer.run.step_profiler import nsys_environment
from lockstep.trainer.run.training_run import seed_everything
from lockstep.utils.device import resolve_device
from lockstep.utils.model_path import base_folder, locate_model
from lockstep.utils.progress import ProgressLog, phase
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.critic import CriticWorker
from lockstep.workers.reward_model import RewardModelWorker

logger = logging.getLogger(__name__)

REPLACEMENT_S = 60.0
"""How long to wait for a machine that replaces a dead one."""
GC_THRESHOLD = 5_000
"""New objects per garbage collection: about two steps' worth, few of which need it."""


class TaskRunner:
    """One method per part, so that a subclass can override it."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, type[Worker]] = {}
        self.mapping: dict[Role, str] = {}
        self.device: str | None = None
        self.last_checkpoint: Path | None = None
        self.has_begun = False
        """Whether the models were loaded and training has begun, also before a restart."""
        self.wait_s: float | None = None
        """How long to wait for machines; None is the backend's default."""
        self.started: dict[str, Any] = {}
        """Worker processes that were started early, by pool."""
        self.on_end: Callable[[int], None] = lambda exit_code: None
        """Called when training has ended, with 0 or 130, before the workers are shut down."""
        self.on_step: OnStep | None = None
        self.agents: Agents | None = None
        self.config: PPOConfig | None = None
        """The trainer's, with the sizes that were chosen for it."""
        self.lowered: list[tuple[str, int]] = []
        """Config keys of micro-batches, and the sizes with which the workers were restarted after out of memory."""
        self.restarts: Restarts
        """Of this command."""

    def add_actor_rollout_worker(self, config: PPOConfig, pools: Pools) -> None:
        for role in (Role.ActorRollout, Role.Actor, Role.Rollout):
            if role in pools.role_pools:
                self._add(role, ActorRolloutRefWorker, pools)

    def add_critic_worker(self, config: PPOConfig, pools: Pools) -> None:
        if need_critic(config):
            self._add(Role.Critic, CriticWorker, pools)

    def add_ref_policy_worker(self, config: PPOConfig, pools: Pools) -> None:
        if need_reference_model(config):
            self._add(Role.RefPolicy, ActorRolloutRefWorker, pools)

    def add_reward_model_worker(self, config: PPOConfig, pools: Pools) -> None:
        if need_reward_model(config):
            self._add(Role.RewardModel, RewardModelWorker, pools)

    def _add(self, role: Role, worker: type[Worker], pools: Pools) -> None:
        self.role_worker_mapping[role] = worker
        self.mapping[role] = pools.role_pools[role]

    def pools(self, config: PPOConfig) -> Pools:
        """The worker pools and the roles that run in them."""
        return pools_of(config, needed_models(config))

    def init_resource_pool_mgr(self, pools: Pools, backend: Backend) -> ResourcePoolManager:
        return ResourcePoolManager(resource_pool_spec=pools.spec, mapping=self.mapping, pool_class=backend.pool_class)

    def build(self, config: PPOConfig) -> PPOTrainer:
        """The trainer of a run, before its models are loaded."""
        pools = self.pools(config)
        device, backend = device_and_backend(config, self.device, self.wait_s, self.started)
        self.device = device
        self.add_actor_rollout_worker(config, pools)
        self.add_critic_worker(config, pools)
        self.add_reward_model_worker(config, pools)
        self.add_ref_policy_worker(config, pools)
        data, tokenizer = config.data, hf_tokenizer(**tokenizer_arguments(config))
        model = config.actor_rollout_ref.model
        trust = model.trust_remote_code or data.trust_remote_code
        processor = hf_processor(model.path, tokenizer, data, trust)
        train_files = [] if config.trainer.val_only else data.train_files
        logger.info("reading data: %s", ", ".join(map(str, [*train_files, *data.val_files])))
        val_dataset = None
        if data.val_files:
            val_dataset = create_rl_dataset(data.val_files, tokenizer, data, data.val_max_samples, "val", processor)
        train_dataset = train_sampler = None
        if not config.trainer.val_only:
            train_dataset = create_rl_dataset(train_files, tokenizer, data, data.train_max_samples, processor=processor)
            train_sampler = create_rl_sampler(data, cast(Sized, train_dataset))
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, in_training=True)
        check_rows(config, reward_fn, train_dataset, val_dataset, in_training=True)
        self.agents = agents_for(config, tokenizer, train_dataset, val_dataset)
        return PPOTrainer(
            config=config,
            tokenizer=tokenizer,
            workers=WorkerGroups(
                self.role_worker_mapping,
                self.init_resource_pool_mgr(pools, backend),
                device,
                self.agents,
                backend.group_class,
                backend.class_with_init,
            ),
            reward_fn=reward_fn,
            val_reward_fn=load_reward_manager(
                config, tokenizer, num_examine=0 if config.trainer.log_val_generations else 1
            ),
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            train_sampler=train_sampler,
        )

    def run(self, config: PPOConfig, interrupt: Interrupt | None = None) -> int:
        """Train; returns 0, or 130 if the user stopped the run.

        A failure with a known cause is a RunError. A RestartError restarts the workers from the run's last checkpoint, up to
        `trainer.max_restarts` times.
        interrupt: records stop requests, if signals do not reach this process.
        """
        with ProgressLog():
            return self._run(config, interrupt)

    def _run(self, config: PPOConfig, interrupt: Interrupt | None) -> int:
        failure: Exception
        folder = Path(config.trainer.default_local_dir).expanduser()
        with Restarts(folder, config.trainer.max_restarts) as self.restarts:
            while True:
                try:
                    code = self._run_once(config, interrupt)
                    set_exit_code(code)
                    return code
                except RestartError as error:
                    if self.restarts.allows(error):
                        if self._is_stopped_before_restart(error, interrupt):
                            return 130
                        config = with_values(config, error.changes)
                        self.wait_s = REPLACEMENT_S
                        continue  # the error is dropped: its frames hold the models of a run in this process
                    failure, cause = error, str(error)
                except RunError as error:  # wrong config or input
                    if not self.restarts.count:
                        raise
                    failure, cause = error, f"the restart failed: {error}"  # the config was valid before
                except Exception as error:  # noqa: BLE001 - the end of the run; unexpected ones are raised again
                    failure, cause = error, cause_of(error, self.config or config)
                break
            exit_code = EXIT_CODE if isinstance(failure, HangError) else 1
            set_exit_code(exit_code)
            if not self.has_begun:
                raise RunError(f"{cause.rstrip('.')}; the run did not start", exit_code) from failure
            resume = how_to_resume(config, self.last_checkpoint)
            raise RunError(f"{cause.rstrip('.')}; the run ended early{resume}", exit_code) from failure

    def _is_stopped_before_restart(self, error: RestartError, interrupt: Interrupt | None) -> bool:
        """Record the restart and wait for its time, or until the user stops the run."""
        restarts = self.restarts
        pause_s = restarts.note(error, self.last_checkpoint)
        if not restarts.wait(pause_s, lambda: interrupt is not None and interrupt.requested):
            return False
        logger.warning("stopped before the restart; run the same command to resume")
        if restarts.status is not None:
            restarts.status.ended("stopped", f"stopped by the user before a restart, after step {restarts.step}")
        self.on_end(130)
        return True

    def _run_once(self, config: PPOConfig, interrupt: Interrupt | None) -> int:
        if self.lowered:
            free_unused()
        seed_everything(config.trainer.seed)
        with ExitStack() as closing:
            closing.callback(self._close_agents)
            try:
                with phase("read the data"):
                    trainer = self.build(config)
                trainer.on_step, self.config = self.on_step, trainer.config
                trainer.run.restarts = self.restarts
                trainer.smaller.add(self.lowered)
                closing.callback(self._close, trainer)
                if self.last_checkpoint is None and trainer.run.is_finished(trainer.total_training_steps):
                    return 0
                closing.push(trainer.run)
                trainer.run.on_forced_end = self.on_end
                trainer.run.lock(trainer.total_training_steps)
                logger.info("loading models: %s", _models(config, self.role_worker_mapping))
                with phase("load models"):
                    trainer.init_workers()
                with phase("start the run"):
                    trainer.start(self.last_checkpoint)  # set if this is a restart
            except ValueError as error:
                where = next((f" ({n})" for n in getattr(error, "__notes__", []) if n.startswith("raised in")), "")
                raise_as_run_error(error, f"{error}{where}")
            if not gc.get_freeze_count():  # else the modules, most of all objects, are frozen already
                gc.collect()
                gc.freeze()  # loaded models stay alive: do not scan them in every collection
                closing.callback(gc.unfreeze)
            closing.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(GC_THRESHOLD)
            self.has_begun = True
            try:
                code = trainer.fit(interrupt)
            except (RuntimeError, MemoryError) as error:
                if not self._lowers(error):
                    raise
                key, size = self.lowered[-1]
                smaller = f"{key}={size}" if "." in key else f"trials of {size} rows (trainer.audit.micro_batch_split)"
                cause = f"{cause_of(error, trainer.config)}; going on with {smaller}"
            else:
                self.on_end(code)
                return code
        raise RestartError(cause, counts=False)

    def _lowers(self, error: BaseException) -> bool:
        """Whether the workers can be restarted with smaller micro-batches: several ranks cannot go on by themselves."""
        failure = failure_of(error)
        if failure is None or failure.smaller is None:
            return False
        if any(key == failure.key and size <= failure.smaller for key, size in self.lowered):
            return False  # it had no effect
        self.lowered.append((failure.key, failure.smaller))
        return True

    def _close_agents(self) -> None:
        if self.agents is not None:
            self.agents.close()

    def _close(self, trainer: PPOTrainer) -> None:
        trainer.run.end_saving()
        self.last_checkpoint = trainer.run.last_checkpoint or self.last_checkpoint
        trainer.close()


def device_and_backend(
    config: PPOConfig, device: str | None = None, wait_s: float | None = None, started: dict[str, Any] | None = None
) -> tuple[str, Backend]:
    """The device and the backend of a run. device: overrides the config; wait_s, started: see `TaskRunner`."""
    if controller_of(config) == "local":
        return resolve_device(config.trainer.device), LOCAL
    from lockstep.single_controller.ray_backend import has_gpus, make_ray_backend

    device = device or config.trainer.device
    if device == "auto":  # the controller's machine may have no GPU
        device = "cuda" if has_gpus() else "cpu"
    options = nsys_environment(config, "worker")
    return device, make_ray_backend(device == "cuda", wait_s, started or {}, actor_options=options)


def _models(config: PPOConfig, roles: Iterable[Role]) -> str:
    """Each role's model and, of a local folder or checkpoint, the size of its weights."""
    actor = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    others = {
        Role.Critic: ("critic.model.path", config.critic.model.path),
        Role.RewardModel: ("reward_model.model.path", config.reward_model.model.path),
    }
    found: dict[str, list[str]] = {}
    for role in roles:
        found.setdefault(_place(*others.get(role, actor)), []).append(str(role))
    return "; ".join(f"{place} as {', '.join(names)}" for place, names in found.items())


def _place(key: str, path: str) -> str:
    """The folder, which differs between roles if `path` is a checkpoint, and its size; or the path of a model elsewhere."""
    place = locate_model(path, key)
    if not isinstance(place, Path):
        return path
    num_bytes = sum(file.stat().st_size for file in base_folder(place, key).glob("*.safetensors"))
    unit, name = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
    return f"{place} ({num_bytes / unit:.3g} {name})" if num_bytes else str(place)


def check_rows(config: PPOConfig, reward_fn: RewardFn, *datasets: Any, in_training: bool = False) -> None:
    """ValueError if a row has no scorer; datasets of other classes are not checked.

    in_training: the default reward function gives partial credit.
    """
    if need_reward_model(config) and not config.reward_model.ensemble:
        return
    for dataset in datasets:
        if isinstance(dataset, RLHFDataset):
            check_scorers(reward_fn, dataset.data_sources, in_training)
