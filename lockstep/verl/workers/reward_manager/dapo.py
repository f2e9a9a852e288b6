"""verl.workers.reward_manager.dapo"""

from lockstep.rewards.managers import DapoRewardManager as DAPORewardManager

__all__ = ["DAPORewardManager"]
