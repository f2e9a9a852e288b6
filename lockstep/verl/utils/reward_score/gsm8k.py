"""verl.utils.reward_score.gsm8k"""

from lockstep.rewards.scorers.gsm8k import compute_score as compute_score, extract_solution as extract_solution
