"""verl.utils.reward_score.gsm8k"""

from lockstep.rewards.scorers.gsm8k import compute_score, extract_solution

__all__ = ["compute_score", "extract_solution"]
