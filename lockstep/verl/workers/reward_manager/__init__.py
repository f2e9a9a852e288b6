"""verl.workers.reward_manager: the managers, and how a program adds its own."""

from lockstep.rewards.managers import (
    BatchRewardManager as BatchRewardManager,
    DapoRewardManager,
    NaiveRewardManager as NaiveRewardManager,
    PrimeRewardManager as PrimeRewardManager,
)
from lockstep.verl.workers.reward_manager.abstract import AbstractRewardManager as AbstractRewardManager
from lockstep.verl.workers.reward_manager.registry import (
    get_reward_manager_cls as get_reward_manager_cls,
    register as register,
)

DAPORewardManager = DapoRewardManager
