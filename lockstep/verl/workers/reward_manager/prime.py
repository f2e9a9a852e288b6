"""verl.workers.reward_manager.prime"""

from lockstep.rewards.managers import PrimeRewardManager as PrimeRewardManager
