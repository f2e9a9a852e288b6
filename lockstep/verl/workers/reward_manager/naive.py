"""verl.workers.reward_manager.naive"""

from lockstep.rewards.managers import NaiveRewardManager as NaiveRewardManager
