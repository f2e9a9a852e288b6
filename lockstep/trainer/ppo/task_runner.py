"""Puts a training run together from its config: workers, pools, tokenizer, rewards, data, trainer."""

import os
import random
import sys
import traceback
from collections.abc import Sized
from typing import cast

import numpy as np
import torch

from lockstep.config.ppo import PPOConfig
from lockstep.data.rl_dataset import create_rl_dataset
from lockstep.data.sampler import create_rl_sampler
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.rewards.default import check_data_sources
from lockstep.rewards.managers import load_reward_manager
from lockstep.single_controller import LocalWorkerGroup, ResourcePoolManager, Role, Worker
from lockstep.trainer.audit import AuditError
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.roles import need_critic, need_reference_policy, need_reward_model
from lockstep.utils.device import resolve_device
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.critic import CriticWorker
from lockstep.workers.reward_model import RewardModelWorker


class TaskRunner:
    """One method a part, so that a subclass can replace one."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, type[Worker]] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: PPOConfig) -> None:
        self._add(Role.ActorRollout, ActorRolloutRefWorker)

    def add_critic_worker(self, config: PPOConfig) -> None:
        if need_critic(config):
            self._add(Role.Critic, CriticWorker)

    def add_ref_policy_worker(self, config: PPOConfig) -> None:
        if need_reference_policy(config):
            self._add(Role.RefPolicy, ActorRolloutRefWorker)

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        if need_reward_model(config):
            self._add(Role.RewardModel, RewardModelWorker)

    def _add(self, role: Role, worker: type[Worker]) -> None:
        self.role_worker_mapping[role] = worker
        self.mapping[role] = "global_pool"

    def init_resource_pool_mgr(self, config: PPOConfig) -> ResourcePoolManager:
        spec = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        return ResourcePoolManager(resource_pool_spec=spec, mapping=self.mapping)

    def build(self, config: PPOConfig) -> PPOTrainer:
        """The trainer of a run, its models not yet loaded."""
        self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config)
        model, data = config.actor_rollout_ref.model, config.data
        tokenizer = hf_tokenizer(
            data.tokenizer or model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code or data.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
        )
        val_dataset = None
        if data.val_files:
            val_dataset = create_rl_dataset(data.val_files, tokenizer, data, data.val_max_samples)
        train_dataset = create_rl_dataset(data.train_files, tokenizer, data, data.train_max_samples)
        if not need_reward_model(config):
            check_data_sources(config, [d for d in (train_dataset, val_dataset) if d is not None])
        return PPOTrainer(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=LocalWorkerGroup,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
            val_reward_fn=load_reward_manager(
                config, tokenizer, num_examine=0 if config.trainer.log_val_generations else 1
            ),
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            train_sampler=create_rl_sampler(data, cast(Sized, train_dataset)),
            device_name=resolve_device(config.trainer.device),
        )

    def run(self, config: PPOConfig) -> int:
        """Train; returns the exit code. What is wrong with the user's files is told without a traceback."""
        _seed_everything(config.trainer.seed)
        try:
            trainer = self.build(config)
            trainer.init_workers()
            trainer.start()
        except ValueError as error:
            if os.environ.get("LOCKSTEP_DEBUG"):
                raise
            sys.stderr.write(f"error: {error}\n(LOCKSTEP_DEBUG=1 shows the traceback)\n")
            return 2
        try:
            return trainer.fit()
        except (ValueError, AuditError, FloatingPointError) as error:
            log = trainer.run_dir / "error.txt"
            log.write_text(traceback.format_exc())
            sys.stderr.write(f"error: {error}\n(the traceback: {log})\n")
            return 1


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
