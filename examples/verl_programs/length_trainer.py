"""A program written on verl: a trainer with its own `fit`, its own advantage estimator and its own validation.

GRPO whose advantages shrink with the length of the response; the loop is written out, as recipes on verl do.
"""

import sys
import uuid
from collections import defaultdict
from enum import Enum

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import compute_reward, load_reward_manager
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, should_save_ckpt_esi
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.fs import copy_to_local
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_functional import masked_mean
from verl.utils.tracking import Tracking


class Estimator(Enum):
    SHORT_GRPO = "short_grpo"


@register_adv_est(Estimator.SHORT_GRPO)
def compute_short_grpo_advantage(token_level_rewards, response_mask, index, config=None, **kwargs):
    advantages, _ = core_algos.compute_grpo_outcome_advantage(token_level_rewards, response_mask, index)
    lengths = response_mask.sum(-1, keepdim=True).clamp(min=1)
    advantages = advantages * lengths.float().rsqrt()
    return advantages, advantages


class LengthTrainer(RayPPOTrainer):
    def _validate(self):
        metrics = super()._validate()
        metrics["val/prompts"] = len(self.val_dataset)
        return metrics

    def fit(self):
        logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.global_steps = 0
        self._load_checkpoint()
        if self.val_reward_fn is not None and self.config.trainer.get("val_before_train", True):
            logger.log(data=self._validate(), step=self.global_steps)
        self.global_steps += 1
        for _ in range(self.config.trainer.total_epochs):
            for batch_dict in self.train_dataloader:
                metrics, timing_raw = {}, defaultdict(float)
                is_last_step = self.global_steps >= self.total_training_steps
                batch = DataProto.from_single_dict(batch_dict)
                batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
                with marked_timer("step", timing_raw):
                    batch = self.sample(batch, timing_raw)
                    with marked_timer("reward", timing_raw, color="yellow"):
                        reward_tensor, extra = compute_reward(batch, self.reward_fn)
                        batch.batch["token_level_scores"] = reward_tensor
                        batch.non_tensor_batch.update({name: np.array(values) for name, values in extra.items()})
                    batch.batch["response_mask"] = compute_response_mask(batch)
                    self._balance_batch(batch, metrics=metrics)
                    batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
                    batch = self.log_probs(batch, metrics, timing_raw)
                    with marked_timer("adv", timing_raw, color="brown"):
                        batch = self.advantages(batch, metrics)
                    with marked_timer("update_actor", timing_raw, color="red"):
                        actor_output = self.actor_rollout_wg.update_actor(batch)
                    metrics.update(reduce_metrics(actor_output.meta_info["metrics"]))
                    esi = should_save_ckpt_esi(max_steps_duration=timing_raw["step"])
                    if is_last_step or esi or self.global_steps % self.config.trainer.save_freq == 0:
                        self._save_checkpoint()
                metrics["lengths/mean"] = self.mean_length(batch)
                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
                n_gpus = self.resource_pool_manager.get_n_gpus()
                metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus))
                logger.log(data=metrics, step=self.global_steps)
                if is_last_step:
                    self.last_path = find_latest_ckpt_path(self.config.trainer.default_local_dir)
                    return
                self.global_steps += 1

    def sample(self, batch, timing_raw):
        gen_batch = batch.pop(
            batch_keys=["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["raw_prompt_ids"]
        )
        n = self.config.actor_rollout_ref.rollout.n
        with marked_timer("gen", timing_raw, color="red"):
            output = self.actor_rollout_wg.generate_sequences(gen_batch.repeat(repeat_times=n, interleave=True))
            timing_raw.update(output.meta_info["timing"])
            output.meta_info.pop("timing", None)
        return batch.repeat(repeat_times=n, interleave=True).union(output)

    def log_probs(self, batch, metrics, timing_raw):
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            old_log_prob = self.actor_rollout_wg.compute_log_prob(batch)
            entropys = old_log_prob.batch["entropys"]
            mode = self.config.actor_rollout_ref.actor.loss_agg_mode
            entropy = agg_loss(loss_mat=entropys, loss_mask=batch.batch["response_mask"], loss_agg_mode=mode)
            metrics["actor/entropy"] = entropy.detach().item()
            old_log_prob.batch.pop("entropys")
            batch = batch.union(old_log_prob)
        metrics.update(calculate_debug_metrics(batch))
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"):
                batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
        return batch

    def advantages(self, batch, metrics):
        algorithm = self.config.algorithm
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
            metrics.update(kl_metrics)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        return compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )

    def mean_length(self, batch):
        mask = batch.batch["response_mask"]
        return masked_mean(mask.sum(-1).float(), mask.any(-1)).item()


class LengthTaskRunner(TaskRunner):
    def run(self, config):
        actor_rollout_cls, ray_worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_ref_policy_worker(config, actor_rollout_cls)
        tokenizer = hf_tokenizer(copy_to_local(config.actor_rollout_ref.model.path))
        trainer = LengthTrainer(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=ray_worker_group_cls,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
        )
        trainer.init_workers()
        trainer.fit()


if __name__ == "__main__":
    run_ppo(OmegaConf.load(sys.argv[1]), task_runner_class=LengthTaskRunner)
