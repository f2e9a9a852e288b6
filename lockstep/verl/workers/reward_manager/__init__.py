"""verl.workers.reward_manager: the managers, and how a program adds its own."""

from lockstep.rewards.managers import (
    BatchRewardManager,
    DapoRewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)
from lockstep.verl.workers.reward_manager.abstract import AbstractRewardManager
from lockstep.verl.workers.reward_manager.registry import get_reward_manager_cls, register

DAPORewardManager = DapoRewardManager

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "get_reward_manager_cls",
    "register",
]
