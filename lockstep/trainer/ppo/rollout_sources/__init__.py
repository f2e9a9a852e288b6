"""Where a training step gets its samples from, by `trainer.async_mode`.

rollout_source.py the interface, and what asynchronous sources share
synchronous.py    null: generate, score and train in turn
colocated.py, one_step_off.py, fully_async.py    one loop each
group_schedule.py which groups run ahead, and which a step trains on
background.py     the thread that generates
journal.py        what became of every group, for an exact resume
"""

from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.async_sampling import AsyncSampling
from lockstep.trainer.ppo.rollout_sources.colocated import ColocatedSource
from lockstep.trainer.ppo.rollout_sources.fully_async import FullyAsyncSource
from lockstep.trainer.ppo.rollout_sources.one_step_off import OneStepOffSource
from lockstep.trainer.ppo.rollout_sources.rollout_source import AsyncSource, RolloutSource
from lockstep.trainer.ppo.rollout_sources.synchronous import SynchronousSource
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.weight_sync import WeightSync

__all__ = ["ASYNC_SOURCES", "RolloutSource", "create_source"]

ASYNC_SOURCES: dict[str, type[AsyncSource]] = {
    "colocated": ColocatedSource,
    "one_step_off": OneStepOffSource,
    "fully_async": FullyAsyncSource,
}


def create_source(
    config: PPOConfig, sampling: Sampling, weight_sync: WeightSync | None, last_step: int
) -> RolloutSource:
    """last_step: of the run."""
    mode = config.trainer.async_mode
    if mode is None or config.trainer.val_only:
        return SynchronousSource(sampling, weight_sync)
    assert isinstance(sampling, AsyncSampling), "checked with the config"
    return ASYNC_SOURCES[mode](config, sampling, weight_sync, last_step)
