"""Sizes that nobody has set: a mini-batch that follows the batch, a smaller batch for a dataset that has fewer rows."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.micro_batches import unset_tokens
from lockstep.config.ppo import PPOConfig, prompts_per_batch
from lockstep.config.schema import with_values
from lockstep.config.sft import SupervisedConfig

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=PPOConfig | SupervisedConfig)

BATCH = "data.train_batch_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


ONE_UPDATE = {MINI: f"${{{BATCH}}}"}
"""The setting that makes a step one update."""


def mini_batch_size(values: Mapping[str, Any], batch: Any, *, is_short: bool) -> tuple[dict[str, Any], list[str]]:
    """The size of mini-batches that follows the batch size, with a notice; empty if the user has set it or its default fits.

    values: the keys that the user has set. batch: the batch size, resolved. is_short: it was given by its short name.
    """
    if MINI in values:
        return {}, []
    if is_short:
        return ONE_UPDATE, []
    largest = ActorConfig.ppo_mini_batch_size
    if isinstance(batch, str) and batch.isdigit():  # of an environment variable
        batch = int(batch)
    if not isinstance(batch, int) or not 0 < batch < largest:
        return {}, []
    return {MINI: batch}, [f"{MINI} is not set; using {batch}, all prompts of a step, because its default is {largest}"]


def unset_sizes(values: Mapping[str, Any]) -> frozenset[str]:
    """values: the keys that the user has set."""
    return frozenset({BATCH, MINI} - set(values)) | unset_tokens(values)


def fitted_to_rows(config: C, num_rows: int) -> C:
    """The config with a batch that `num_rows` rows can fill, if the user has set none; logs it."""
    if BATCH not in config.unset_sizes or num_rows < 1:
        return config
    sizes = _supervised(config, num_rows) if isinstance(config, SupervisedConfig) else _rl(config, num_rows)
    if not sizes:
        return config
    logger.warning(
        "the dataset has %d rows, fewer than a step takes by default (%s=%d); using %s",
        num_rows,
        BATCH,
        config.data.train_batch_size,
        " and ".join(f"{key}={size}" for key, size in sizes.items()),
    )
    if isinstance(config, PPOConfig) and MINI in sizes:
        follows = config.critic.ppo_mini_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size
        sizes |= {"critic.ppo_mini_batch_size": sizes[MINI]} if follows else {}
    found: C = with_values(config, sizes)
    return found


def _supervised(config: SupervisedConfig, num_rows: int) -> dict[str, Any]:
    return {BATCH: num_rows} if num_rows < config.data.train_batch_size else {}


def _rl(config: PPOConfig, num_rows: int) -> dict[str, Any]:
    """Empty also if mini-batches that the user has set are too large: the loader reports it."""
    if prompts_per_batch(config) <= num_rows or config.data.gen_batch_size is not None:
        return {}
    most = int(num_rows * (1 - config.actor_rollout_ref.rollout.over_sample_rate) + 1e-9)
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini > most > 0 and MINI in config.unset_sizes:
        return {BATCH: most, MINI: most}
    return {BATCH: most // mini * mini} if mini <= most else {}
