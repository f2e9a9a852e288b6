"""The root of a training run's configuration."""

import math
from dataclasses import dataclass, field

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.config.algorithm import AlgoConfig
from lockstep.config.critic import CriticConfig
from lockstep.config.data import DataConfig
from lockstep.config.environment import RootConfig
from lockstep.config.profiler import GlobalProfilerConfig
from lockstep.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from lockstep.config.trainer import RayInitConfig, TrainerConfig


@dataclass(frozen=True)
class PPOConfig(RootConfig):
    algorithm: AlgoConfig = field(default_factory=AlgoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)
    global_profiler: GlobalProfilerConfig = field(default_factory=GlobalProfilerConfig)
    resource_pool_spec: dict[str, list[int]] = field(default_factory=dict)
    """Worker pools with their processes per machine, such as `{global_pool: [8, 8], reward_pool: [4]}`; empty uses
    `trainer.placement`."""
    resource_pool_mapping: dict[str, str] = field(default_factory=dict)
    """The pool of each role (actor_rollout, or actor and rollout; ref, critic, rm). Other roles run in `global_pool`, the reward
    model in `reward_pool` if it exists."""


def prompts_per_batch(config: PPOConfig) -> int:
    """Prompts of a batch of the data loader: those of a step, and with `rollout.over_sample_rate` those it does not wait for."""
    batch = config.data.gen_batch_size or config.data.train_batch_size
    return math.ceil(batch / (1 - config.actor_rollout_ref.rollout.over_sample_rate) - 1e-9)
