"""The data loader of training prompts."""

from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import Dataset

from lockstep.config.ppo import PPOConfig, prompts_per_batch
from lockstep.data.loader import StatefulLoader, create_dataloader


def create_train_loader(config: PPOConfig, dataset: Dataset[Any], sampler: Any, collate_fn: Any) -> StatefulLoader:
    """Batches of the prompts that a step generates; ValueError if the dataset has too few rows for one."""
    data = config.data
    batch_size, num_rows = prompts_per_batch(config), len(cast(Sized, dataset))
    if (data.gen_batch_size or data.train_batch_size) <= num_rows < batch_size:
        rate = config.actor_rollout_ref.rollout.over_sample_rate
        raise ValueError(
            f"actor_rollout_ref.rollout.over_sample_rate={rate:g}: a step generates {batch_size} prompts, but the dataset has "
            f"only {num_rows} rows; lower it, or data.train_batch_size={data.train_batch_size}"
        )
    return create_dataloader(
        dataset,
        batch_size=batch_size,
        shuffle=data.shuffle,
        seed=config.trainer.seed if data.seed is None else data.seed,
        num_workers=data.dataloader_num_workers,
        drop_last=True,
        sampler=sampler,
        collate_fn=collate_fn,
    )
