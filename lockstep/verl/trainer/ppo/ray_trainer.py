"""verl.trainer.ppo.ray_trainer: the trainer that programs on verl construct and subclass.

`RayPPOTrainer` is Lockstep's trainer with verl's arguments. A subclass may override single methods (`_validate`,
`_save_checkpoint`, ...) or the whole of `fit`; for the latter, the worker groups take and return whole batches, as in verl:

    fit of a program ──► WholeBatchGroup ── mini-batches, futures, sampling seeds ──► worker group

Batches are balanced over the ranks inside these calls, and `generate_sequences` returns one response per row.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from lockstep.algorithms.compute_advantage import compute_advantage, compute_response_mask
from lockstep.algorithms.kl import apply_kl_penalty
from lockstep.config.estimators import AdvantageEstimator
from lockstep.config.placement import need_critic, need_reference_model, need_reward_model
from lockstep.config.ppo import PPOConfig
from lockstep.data.loader import create_dataloader
from lockstep.observability.rollout_log import dump_generations
from lockstep.protocol import DataProto, object_array, pad_dataproto_to_divisor, unpad_dataproto
from lockstep.rewards.managers import RewardFn, load_reward_manager
from lockstep.single_controller import Backend, ResourcePoolManager, Role, Worker, WorkerGroup
from lockstep.trainer.agents import agents_for
from lockstep.trainer.checkpoint import RunLock
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.trainer.ppo.task_runner import check_rows, device_and_backend
from lockstep.trainer.run_config import write_run_config
from lockstep.verl._config import typed_config, view
from lockstep.verl._ray import unwrapped
from lockstep.verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
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

FORWARD_KEYS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
REWARD_COLUMNS = {"data_source", "reward_model", "extra_info", "uid"}
"""Columns that stay with the batch while its prompts are being answered."""


class PendingBatch:
    """The result of a forward pass: used like a DataProto, it waits when it is first read."""

    def __init__(self, future: Any) -> None:
        self._future = future
        self._result: DataProto | None = None

    def get(self) -> DataProto:
        if self._result is None:
            self._result = self._future.get()
        assert self._result is not None
        return self._result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)

    def __len__(self) -> int:
        return len(self.get())

    def __getitem__(self, item: Any) -> Any:
        return self.get()[item]


class WholeBatchGroup:
    """A worker group as programs on verl call it; everything else is the group's own."""

    def __init__(self, group: WorkerGroup, trainer: "RayPPOTrainer") -> None:
        self._group, self._trainer = group, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row. meta_info: `validate` samples as validation does, `do_sample=False` greedily."""
        rollout, inputs = self._group, self._trainer.rollout_inputs(prompts)
        if self._trainer.agents is not None:
            rollout = self._trainer.sampling.rollout_wg
            ids = {"uid": object_array([str(row) for row in range(len(prompts))])}
            inputs.non_tensor_batch = ids | prompts.non_tensor_batch | inputs.non_tensor_batch
        output: DataProto = rollout.generate_sequences(inputs)
        output.meta_info.setdefault("timing", {})
        return output

    def compute_log_prob(self, data: DataProto) -> PendingBatch:
        return PendingBatch(self._group.compute_log_prob(_forward_inputs(data)))

    def compute_ref_log_prob(self, data: DataProto) -> PendingBatch:
        return PendingBatch(self._group.compute_ref_log_prob(_forward_inputs(data)))

    def compute_values(self, data: DataProto) -> PendingBatch:
        return PendingBatch(self._group.compute_values(_forward_inputs(data)))

    def compute_rm_score(self, data: DataProto) -> PendingBatch:
        return PendingBatch(self._group.compute_rm_score(data))

    def update_actor(self, data: DataProto) -> Any:
        return self._trainer.update("actor", self._group, data)

    def update_critic(self, data: DataProto) -> Any:
        return self._trainer.update("critic", self._group, data)


class RayPPOTrainer(PPOTrainer):
    """See the module docstring.

    config:               the program's DictConfig; `self.config` is a complete copy of it.
    role_worker_mapping:  Role -> worker class, which may be wrapped by `ray.remote`. Roles that the config does not need
                          are not started.
    ray_worker_group_cls: not used: `trainer.controller` says whether workers run in this process or on Ray.
    reward_fn:            None is the manager of the config, then for validation too.
    train_dataset:        None reads `data.train_files`, unless `trainer.val_only`.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: ResourcePoolManager,
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
        super().__init__(
            config=typed,
            tokenizer=tokenizer,
            role_worker_mapping={role: _worker(cls) for role, cls in workers.items()},
            resource_pool_manager=resource_pool_manager,
            ray_worker_group_cls=_group_class(backend),
            class_with_init=backend.class_with_init,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            agents=agents_for(typed, tokenizer, train_dataset, val_dataset),
            collate_fn=collate_fn,
            train_sampler=train_sampler,
            device_name=device if device_name in (None, "auto") else device_name,
        )
        self._typed = self.config  # with sizes that were not set
        full = view(config, self._typed)
        self._given = OmegaConf.to_container(full)
        self.config: Any = full
        self.processor = processor
        self.async_rollout_mode, self.ref_in_actor, self.hybrid_engine = False, False, True
        self.tracking: Any = OpenTrackings()
        self._draws: dict[int, int] = {}
        self._locked = ExitStack()
        weakref.finalize(self, self._locked.close)  # programs on verl do not call `close`

    @contextmanager
    def _typed_config(self) -> Iterator[PPOConfig]:
        """Lockstep's own code reads the typed config; that of a subclass the DictConfig, whose changes count."""
        if (now := OmegaConf.to_container(self.config)) != self._given:
            self._typed, self._given = typed_config(self.config), now
        full, self.config = self.config, self._typed
        try:
            yield self._typed
        finally:
            self.config = full

    def init_workers(self) -> None:
        with self._typed_config():
            super().init_workers()
        for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg", "rm_wg"):
            if (group := getattr(self, name)) is not None:
                setattr(self, name, WholeBatchGroup(group, self))
        self.async_rollout_manager = WholeBatchGroup(self.rollout_wg, self)

    def _sampling(self) -> Sampling:
        """One call of `generate_sequences` per batch in both modes: workers may override it."""
        trainer, rollout = self.config.trainer, self.config.actor_rollout_ref.rollout
        for key, value in {
            "trainer.async_mode": trainer.async_mode,
            "actor_rollout_ref.rollout.over_sample_rate": rollout.over_sample_rate,
        }.items():
            if value:
                raise ValueError(f"{key}={value}: programs written for verl generate whole batches; use lockstep ppo")
        return PromptTensorSampling(self.config, self._rollout(), self.rm_wg, self.reward_fn)

    def start(self, resume_from: Path | None = None) -> None:
        with self._typed_config():
            super().start(resume_from)

    def _prompts(self, interrupt: Any) -> Iterator[DataProto]:
        yield from (without_prompt_tensors(batch) for batch in super()._prompts(interrupt))

    def rollout_inputs(self, prompts: DataProto) -> DataProto:
        """What the rollout worker needs, from the columns that programs on verl have in a batch of prompts."""
        columns, tensors = prompts.non_tensor_batch, prompts.batch
        if "raw_prompt_ids" in columns:
            ids = columns["raw_prompt_ids"]
        elif tensors is not None and "input_ids" in tensors:
            pairs = zip(tensors["input_ids"], tensors["attention_mask"])
            ids = object_array([row[mask.bool()].tolist() for row, mask in pairs])
        elif "raw_prompt" in columns:
            encode = self.tokenizer.apply_chat_template
            texts = [encode(list(chat), add_generation_prompt=True, tokenize=False) for chat in columns["raw_prompt"]]
            ids = object_array(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        else:
            raise ValueError(
                f"generate_sequences needs raw_prompt_ids, input_ids or raw_prompt; got {sorted(prompts._columns())}"
            )
        validate = bool(prompts.meta_info.get("validate", False))
        draw = self._draws[self.global_steps] = self._draws.get(self.global_steps, 0) + 1
        entropy = [self.config.actor_rollout_ref.rollout.seed, self.global_steps, draw, int(validate)]
        words = np.random.SeedSequence(entropy).generate_state(len(prompts), np.uint64)
        seeds = torch.from_numpy((words >> 1).astype(np.int64))
        greedy = not prompts.meta_info.get("do_sample", True) and not validate
        meta = {"validate": validate, "greedy": greedy, "global_steps": self.global_steps}
        return DataProto.from_dict({"sampling_seed": seeds}, {"raw_prompt_ids": ids}, meta)

    def update(self, role: str, group: Any, data: DataProto) -> Any:
        """Update from a whole batch; a batch that the loop has laid out in mini-batches goes on as it is."""
        if "mini_batch" in data.tensors:
            return getattr(group, f"update_{role}")(data)
        with self._typed_config() as typed:
            section = typed.actor_rollout_ref.actor if role == "actor" else typed.critic
            rule = self._mini_batches(section, prepare=self._prepare_loss() if role == "actor" else None)
            batch = data.select()
            batch.meta_info["rollout_gap"] = "none"
            output = getattr(group, f"update_{role}")(self._laid_out(batch, rule, group.mesh(role).dp_size)).get()
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
        found = self._seqlen_metrics(batch)
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

    def _save_checkpoint(self, metrics: dict[str, Any] | None = None) -> None:
        if metrics is None:  # called by the `fit` of a program
            self.loader_state = deepcopy(self.train_dataloader.state_dict())
        with self._typed_config():
            super()._save_checkpoint(metrics or {})

    def _load_checkpoint(self, resume_from: Path | None = None) -> dict[str, Any]:
        if not isinstance(self.config, PPOConfig):  # called by the `fit` of a program, which does not call `start`
            with self._typed_config() as typed:
                self._locked.enter_context(RunLock(self.run_dir))
                self.checkpoints.clean_stale()
                metrics = super()._load_checkpoint(resume_from)
                if self.train_dataloader is not None:
                    self.train_dataloader.check_state()
                write_run_config(self.run_dir, typed, self.global_steps)
                if self.weight_sync is not None:
                    self.weight_sync.run(self.num_updates)
            return metrics
        return super()._load_checkpoint(resume_from)

    def close(self) -> None:
        self._locked.close()
        super().close()


class PromptTensorSampling(Sampling):
    """Accepts prompts with the tensors of verl's dataset."""

    def generate(self, prompts: DataProto, **options: Any) -> DataProto:
        return super().generate(without_prompt_tensors(prompts), **options)

    def generate_for_validation(self, prompts: DataProto, rows: Sequence[int], *, step: int) -> DataProto:
        return super().generate_for_validation(without_prompt_tensors(prompts), rows, step=step)


def _forward_inputs(data: DataProto) -> DataProto:
    if "response_mask" not in data.tensors:
        data.tensors["response_mask"] = compute_response_mask(data)
    return data.select(FORWARD_KEYS, [])


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
