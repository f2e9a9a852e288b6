"""verl.trainer.ppo.ray_trainer: the trainer that programs on verl construct and subclass.

`RayPPOTrainer` is Lockstep's trainer with verl's arguments. A subclass may override single methods (`_validate`,
`_save_checkpoint`, ...), `init_workers`, or the whole of `fit`; for the latter, the worker groups take and return whole batches, as
in verl (`lockstep.verl._whole_batches`).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.algorithms.compute_advantage import compute_advantage, compute_response_mask
from lockstep.algorithms.kl import apply_kl_penalty
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.config.placement import need_critic, need_reference_model, need_reward_model
from lockstep.config.ppo import PPOConfig
from lockstep.data.loader import create_dataloader, create_train_loader
from lockstep.observability.rollout_log import dump_generations
from lockstep.protocol import DataProto, object_array, pad_dataproto_to_divisor, unpad_dataproto
from lockstep.rewards.managers import RewardFn, load_reward_manager
from lockstep.single_controller import Backend, LocalWorkerGroup, Role, Worker, WorkerGroup, placement
from lockstep.trainer.ppo.metrics import compute_balance_metrics
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.run_agents import agents_for
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.trainer.ppo.task_runner import check_rows, device_and_backend
from lockstep.trainer.ppo.worker_calls import update_batch
from lockstep.trainer.ppo.worker_groups import WorkerGroups
from lockstep.trainer.run.training_run import num_training_steps
from lockstep.verl._config import typed_config, view
from lockstep.verl._ray import unwrapped
from lockstep.verl._whole_batches import WholeBatchGroup, rollout_inputs, update_inputs
from lockstep.verl.protocol import adopt
from lockstep.verl.single_controller.pools import ResourcePoolManager
from lockstep.verl.trainer._datasets import create_rl_dataset, create_rl_sampler
from lockstep.verl.trainer.ppo.reward import compute_reward
from lockstep.verl.trainer.ppo.utils import WorkerType
from lockstep.verl.utils.dataset.rl_dataset import PROMPT_TENSORS, without_prompt_tensors
from lockstep.verl.utils.metric import reduce_metrics
from lockstep.verl.utils.profiler import marked_timer
from lockstep.verl.utils.tracking import OpenTrackings

_timer = marked_timer
"""The older name."""

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "WorkerType",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
    "compute_reward",
    "marked_timer",
    "pad_dataproto_to_divisor",
    "reduce_metrics",
    "unpad_dataproto",
]

GROUPS = {
    "actor_rollout_wg": Role.ActorRollout,
    "ref_policy_wg": Role.RefPolicy,
    "critic_wg": Role.Critic,
    "rm_wg": Role.RewardModel,
}
"""Attributes of the trainer that hold worker groups."""
REWARD_COLUMNS = {"data_source", "reward_model", "extra_info", "uid"}
"""Columns that stay with the batch while its prompts are being answered."""


class RayPPOTrainer(PPOTrainer):
    """See the module docstring.

    config:               the program's DictConfig; `self.config` is a complete copy of it.
    role_worker_mapping:  Role -> worker class, which may be wrapped by `ray.remote`. Roles that the config does not need
                          are not started.
    ray_worker_group_cls: for an `init_workers` of the program's own; otherwise `trainer.controller` says whether workers run in
                          this process or on Ray.
    reward_fn:            None is the manager of the config, then for validation too.
    train_dataset:        None reads `data.train_files`, unless `trainer.val_only`.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: placement.ResourcePoolManager,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: RewardFn | None = None,
        val_reward_fn: RewardFn | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        typed = typed_config(config)
        full = view(config, typed)
        if reward_fn is None:
            reward_fn = load_reward_manager(typed, tokenizer, num_examine=0)
            val_reward_fn = val_reward_fn or load_reward_manager(typed, tokenizer, num_examine=1)
        data = full.data
        if train_dataset is None and not typed.trainer.val_only:
            train_dataset = create_rl_dataset(data.train_files, data, tokenizer, processor, is_train=True)
        if val_dataset is None and data.val_files:
            val_dataset = create_rl_dataset(data.val_files, data, tokenizer, processor, is_train=False)
        if train_sampler is None and train_dataset is not None:
            train_sampler = create_rl_sampler(data, train_dataset)
        check_rows(typed, reward_fn, train_dataset, val_dataset)
        device, backend = device_and_backend(typed)
        workers = _needed_roles(typed, role_worker_mapping)
        resource_pool_manager.mapping = _needed_roles(typed, resource_pool_manager.mapping)
        resource_pool_manager.pool_class = backend.pool_class
        self.role_worker_mapping = {role: _worker(cls) for role, cls in workers.items()}
        self.resource_pool_manager = resource_pool_manager
        self.device_name = device if device_name in (None, "auto") else device_name
        super().__init__(
            config=typed,
            tokenizer=tokenizer,
            workers=WorkerGroups(
                self.role_worker_mapping,
                resource_pool_manager,
                self.device_name,
                agents_for(typed, tokenizer, train_dataset, val_dataset),
                _group_class(backend),
                backend.class_with_init,
            ),
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=train_sampler,
        )
        self.use_rm = need_reward_model(typed)
        self._typed = self.config  # with sizes that were not set
        full = view(config, self._typed)
        for section, steps in (
            (full.actor_rollout_ref.actor, self.total_training_steps - self.critic_warmup),
            (full.critic, self.total_training_steps),
        ):  # for workers that the program constructs itself
            if section.optim.total_training_steps < 1:
                section.optim.total_training_steps = max(1, steps)
        self._given = OmegaConf.to_container(full)
        self.config: Any = full
        self._given_group_cls = ray_worker_group_cls
        if type(self)._create_dataloader is not RayPPOTrainer._create_dataloader:
            self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self.processor = processor
        self.async_rollout_mode, self.ref_in_actor, self.hybrid_engine = False, False, True
        self.run.tracking = OpenTrackings()
        self._draws: dict[int, int] = {}
        weakref.finalize(self, self.run.close)  # programs on verl do not call `close`

    def _create_dataloader(
        self, train_dataset: Any, val_dataset: Any, collate_fn: Any = None, train_sampler: Any = None
    ) -> None:
        """Set the loaders and the number of steps; for a program that replaces the constructor, or this method."""
        self.train_dataloader = create_train_loader(self.config, train_dataset, train_sampler, collate_fn)
        self.val_dataset, self.collate_fn = val_dataset, collate_fn
        self.total_training_steps = num_training_steps(self.config, len(self.train_dataloader))

    @contextmanager
    def _typed_config(self) -> Iterator[PPOConfig]:
        """Lockstep's own code reads the typed config; that of a subclass the DictConfig, whose changes count."""
        if (now := OmegaConf.to_container(self.config)) != self._given:
            changed = typed_config(self.config)
            written = self._typed.from_environment | changed.from_environment  # `self.config` has the values alone
            self._typed, self._given = replace(changed, from_environment=written), now
            self.run.config = self._typed
        full, self.config = self.config, self._typed
        try:
            yield self._typed
        finally:
            self.config = full

    @property
    def ray_worker_group_cls(self) -> Any:
        """The class for groups that the program builds; those of one worker run on Ray then too."""
        if self._given_group_cls in (None, LocalWorkerGroup):
            from lockstep.verl.single_controller.ray import RayWorkerGroup

            return RayWorkerGroup
        return self._given_group_cls

    def init_workers(self) -> None:
        with self._typed_config():
            super().init_workers()

    def _use_groups(self) -> None:
        super()._use_groups()
        for name in GROUPS:
            if (group := getattr(self, name)) is not None:
                setattr(self, name, WholeBatchGroup(group, self))
        self.async_rollout_manager = WholeBatchGroup(self.rollout_wg, self)

    def _adopt_groups(self) -> None:
        """Complete the trainer if the program's own `init_workers` has only set worker groups."""
        if hasattr(self, "source"):
            return
        from lockstep.verl.single_controller.ray.base import RayWorkerGroup

        given = {role: getattr(self, name, None) for name, role in GROUPS.items()}
        groups = {role: group for role, group in given.items() if isinstance(group, RayWorkerGroup)}
        if Role.ActorRollout not in groups:
            raise ValueError("fit: there are no workers; call init_workers first, which sets actor_rollout_wg")
        by_name = {str(role): group.plain() for role, group in groups.items()}
        processes = {id(group.whole): group.whole.plain() for group in groups.values()}
        if Role.RefPolicy not in groups and groups[Role.ActorRollout].has_reference:
            by_name[str(Role.RefPolicy)] = by_name[str(Role.ActorRollout)]
        with self._typed_config() as typed:
            self.workers.adopt(typed, by_name, processes.values())
            self._use_groups()

    def _sampling(self, rollout: Any) -> Sampling:
        """One call of `generate_sequences` per batch in both modes: workers may override it."""
        trainer, settings = self.config.trainer, self.config.actor_rollout_ref.rollout
        for key, value in {
            "trainer.async_mode": trainer.async_mode,
            "actor_rollout_ref.rollout.over_sample_rate": settings.over_sample_rate,
        }.items():
            if value:
                raise ValueError(f"{key}={value}: programs written for verl generate whole batches; use lockstep ppo")
        return PromptTensorSampling(self.config, rollout, self.rm_wg, self.reward_fn)

    def start(self, resume_from: Path | None = None) -> None:
        self._adopt_groups()
        with self._typed_config():
            super().start(resume_from)

    def _prompts(self, interrupt: Any) -> Iterator[DataProto]:
        yield from (without_prompt_tensors(batch) for batch in super()._prompts(interrupt))

    def generate(self, group: Any, prompts: DataProto) -> DataProto:
        """One response per row, by the rollout's workers or the rows' agents."""
        draw = self._draws[self.global_steps] = self._draws.get(self.global_steps, 0) + 1
        seed = self.config.actor_rollout_ref.rollout.seed
        inputs = rollout_inputs(prompts, lambda: self.tokenizer, seed, self.global_steps, draw)
        if self.workers.agents is not None:
            group = self.sampling.rollout_wg
            ids = {"uid": object_array([str(row) for row in range(len(prompts))])}
            inputs.non_tensor_batch = ids | prompts.non_tensor_batch | inputs.non_tensor_batch
        output: DataProto = group.generate_sequences(inputs)
        return output

    def is_reference(self, group: Any) -> bool:
        return bool(group.name == str(Role.RefPolicy))

    def reference(self, group: Any) -> Any:
        """The group of the reference policy, which the actor's group answers for too."""
        if self.ref_policy_wg is None:
            raise ValueError(
                "compute_ref_log_prob: this run has no reference policy; set actor_rollout_ref.actor.use_kl_loss or "
                "algorithm.use_kl_in_reward"
            )
        return getattr(self.ref_policy_wg, "_group", self.ref_policy_wg)

    def update(self, role: Any, group: Any, data: DataProto) -> Any:
        """Update from a whole batch; a batch that the loop has laid out in mini-batches goes on as it is."""
        if "mini_batch" in data.tensors:
            return getattr(group, f"update_{role}")(data)
        with self._typed_config() as typed:
            laid_out = update_batch(update_inputs(data), role, typed, self.global_steps, group.mesh(role).dp_size)
            output = adopt(getattr(group, f"update_{role}")(laid_out).get())
            if role == "actor":
                self.num_updates += 1
                if self.weight_sync is not None:
                    self.weight_sync.run(self.num_updates)
        return output

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Take the prompts out of the batch; the columns of the reward stay in both."""
        tensors = [name for name in (*PROMPT_TENSORS, "dummy_tensor") if name in batch._columns()]
        columns = batch.non_tensor_batch.keys() - REWARD_COLUMNS
        prompts = batch.pop(batch_keys=tensors, non_tensor_batch_keys=sorted(columns))
        prompts.non_tensor_batch.update(batch.non_tensor_batch)
        return prompts

    def _balance_batch(
        self,
        batch: DataProto,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> None:
        """Metrics of the balance over ranks. The order of the batch stays: updates and forward passes balance themselves."""
        found = compute_balance_metrics(batch, self.actor_rollout_wg.mesh("actor").dp_size)
        metrics.update({name.replace("global_seqlen", logging_prefix, 1): value for name, value in found.items()})

    @property
    def val_dataloader(self) -> Any:
        """Batches of the validation prompts."""
        data, rows = self.config.data, self.val_dataset
        return create_dataloader(
            rows,
            batch_size=data.val_batch_size or len(rows),
            shuffle=data.validation_shuffle,
            seed=self.config.trainer.seed,
            num_workers=0,
            drop_last=False,
            collate_fn=self.collate_fn,
        )

    def _dump_generations(
        self,
        inputs: list[str],
        outputs: list[str],
        gts: list[Any],
        scores: list[float],
        reward_extra_infos_dict: dict[str, list[Any]],
        dump_path: str,
    ) -> None:
        """Write `{step}.jsonl` into the folder."""
        dump_generations(inputs, outputs, gts, scores, {}, reward_extra_infos_dict, dump_path, self.global_steps)

    def _save_checkpoint(
        self, metrics: dict[str, Any] | None = None, is_tested: bool = True, discards: bool = False
    ) -> None:
        if metrics is None:  # called by the `fit` of a program
            self.loader_state = deepcopy(self.train_dataloader.state_dict())
        with self._typed_config():
            super()._save_checkpoint(metrics or {}, is_tested, discards)

    def _load_checkpoint(self, resume_from: Path | None = None) -> dict[str, Any]:
        if not isinstance(self.config, PPOConfig):  # called by the `fit` of a program, which does not call `start`
            self._adopt_groups()
            with self._typed_config():
                metrics = super()._load_checkpoint(resume_from)
                if self.train_dataloader is not None:
                    self.train_dataloader.check_state()
                self.run.write_config(self.global_steps, self.total_training_steps)
                if self.weight_sync is not None:
                    self.weight_sync.run(self.num_updates)
            return metrics
        return super()._load_checkpoint(resume_from)

    def close(self) -> None:
        self.run.close()
        super().close()


class PromptTensorSampling(Sampling):
    """Accepts prompts with the tensors of verl's dataset."""

    def generate(self, prompts: DataProto, **options: Any) -> DataProto:
        return super().generate(without_prompt_tensors(prompts), **options)

    def generate_for_validation(self, prompts: DataProto, rows: Sequence[int], *, step: int) -> DataProto:
        return super().generate_for_validation(without_prompt_tensors(prompts), rows, step=step)


def _group_class(backend: Backend) -> Callable[..., WorkerGroup]:
    """On Ray, workers get copies of their arguments: those of programs on verl may write into them."""
    if backend.name != "ray":
        return backend.group_class
    from lockstep.verl.single_controller.ray.base import CopyingWorkerGroup

    return CopyingWorkerGroup


def _worker(cls: Any) -> type[Worker]:
    worker = unwrapped(cls)
    if not (isinstance(worker, type) and issubclass(worker, Worker)):
        raise TypeError(
            f"role_worker_mapping: {worker!r} is not a subclass of lockstep.verl.single_controller.base.Worker"
        )
    return worker


def _needed_roles(config: PPOConfig, mapping: Mapping[Role, Any]) -> dict[Role, Any]:
    """The roles that the config needs; `ActorRolloutRef` is the policy and, if one is needed, its reference."""
    needed = dict(mapping)
    if Role.ActorRolloutRef in needed:
        combined = needed.pop(Role.ActorRolloutRef)
        needed = {Role.ActorRollout: combined, Role.RefPolicy: combined} | needed
    optional = {
        Role.Critic: need_critic(config),
        Role.RefPolicy: need_reference_model(config),
        Role.RewardModel: need_reward_model(config),
    }
    return {role: value for role, value in needed.items() if optional.get(role, True)}
