"""verl.workers.reward_manager.naive"""

from lockstep.rewards.managers import NaiveRewardManager

__all__ = ["NaiveRewardManager"]
