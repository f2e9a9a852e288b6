"""verl.workers.reward_manager.batch"""

from lockstep.rewards.managers import BatchRewardManager as BatchRewardManager
