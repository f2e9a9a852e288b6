"""verl.utils.reward_score.rlla"""

from lockstep.rewards.scorers.rlla import compute_score as compute_score
