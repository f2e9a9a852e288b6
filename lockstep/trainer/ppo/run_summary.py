"""What a PPO run logs when it starts."""

import logging
from pathlib import Path

from lockstep.config.placement import need_critic, need_reference_policy, need_reward_model
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.worker_groups import WorkerGroups
from lockstep.trainer.run.run_config import warn_if_epochs_end_first, warn_if_on_cpu

logger = logging.getLogger(__name__)


def log_summary(config: PPOConfig, workers: WorkerGroups, folder: Path, num_steps: int, steps_per_epoch: int) -> None:
    """folder: the run's."""
    model = config.actor_rollout_ref.model
    if config.trainer.val_only:
        logger.info("validating %s on %s", model.path, workers.device)
        logger.info("output folder: %s", folder)
        return
    roles = {
        "actor": True,
        "rollout": True,
        "reference (adapters off)" if model.lora_rank else "reference": need_reference_policy(config),
        "critic": need_critic(config),
        "reward model": need_reward_model(config),
    }
    logger.info(
        "%s: %d prompts x %d samples per step, %d steps (%d per epoch) on %s; %s of %s",
        config.algorithm.adv_estimator,
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        num_steps,
        steps_per_epoch,
        workers.device,
        ", ".join(name for name, is_used in roles.items() if is_used),
        model.path,
    )
    if (mode := config.trainer.async_mode) is not None:
        logger.info("asynchronous training: %s, at most %d update(s) behind", mode, config.trainer.max_staleness)
    if workers.count > 1:
        logger.info("workers: %s", workers.describe(config))
    logger.info("output folder: %s", folder)
    warn_if_epochs_end_first(config, num_steps)
    warn_if_on_cpu(config, workers.device, workers.count)
