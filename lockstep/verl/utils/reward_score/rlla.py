"""verl.utils.reward_score.rlla"""

from lockstep.rewards.scorers.rlla import compute_score

__all__ = ["compute_score"]
