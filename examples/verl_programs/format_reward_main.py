"""A program written on verl: a reward manager, and a main with its own TaskRunner.

Scores the default reward of each response, minus a penalty for responses that do not end with a digit.
"""

import os
from collections import defaultdict

import hydra
import torch
from omegaconf import OmegaConf, open_dict
from verl import DataProto
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.device import auto_set_device
from verl.utils.fs import copy_to_local
from verl.utils.reward_score import default_compute_score
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from verl.workers.reward_manager import AbstractRewardManager, register


@register("format_penalty")
class FormatPenaltyRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", penalty=0.5, **kwargs):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.penalty = penalty

    def __call__(self, data: DataProto, return_dict=False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            valid_length = int(item.batch["attention_mask"][prompt_length:].sum())
            response = self.tokenizer.decode(item.batch["responses"][:valid_length], skip_special_tokens=True)
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=response,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            well_formed = response[-1:].isdigit()
            reward_tensor[i, max(valid_length - 1, 0)] = score - (0.0 if well_formed else self.penalty)
            extra["well_formed"].append(float(well_formed))
        return {"reward_tensor": reward_tensor, "reward_extra_info": extra} if return_dict else reward_tensor


class FormatTaskRunner(TaskRunner):
    def run(self, config):
        OmegaConf.resolve(config)
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        local_path = copy_to_local(
            config.actor_rollout_ref.model.path, use_shm=config.actor_rollout_ref.model.get("use_shm", False)
        )
        tokenizer = hf_tokenizer(local_path, trust_remote_code=config.data.get("trust_remote_code", False))
        processor = hf_processor(local_path, use_fast=True)

        self.add_actor_rollout_worker(config)
        self.role_worker_mapping = {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker}
        mapping = dict.fromkeys(self.role_worker_mapping, "global_pool")
        pools = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}

        reward_kwargs = config.reward_model.get("reward_kwargs", {})
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs)
        val_reward_fn = load_reward_manager(config, tokenizer, num_examine=1, **reward_kwargs)
        train_dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, processor)
        val_dataset = create_rl_dataset(config.data.val_files, config.data, tokenizer, processor, is_train=False)

        trainer = RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=ResourcePoolManager(resource_pool_spec=pools, mapping=mapping),
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train_dataset),
            device_name=config.trainer.device,
        )
        trainer.init_workers()
        trainer.fit()


@hydra.main(config_path=None, config_name="ppo_trainer", version_base=None)
def main(config):
    auto_set_device(config)
    with open_dict(config):
        config.reward_model.reward_manager = "format_penalty"
        config.reward_model.reward_kwargs = {"penalty": config.get("format_penalty", 0.5)}
    os.environ.update(get_ppo_ray_runtime_env()["env_vars"])
    run_ppo(config, task_runner_class=FormatTaskRunner)


if __name__ == "__main__":
    main()
