"""verl.utils.reward_score.math_dapo"""

from lockstep.rewards.scorers.math_dapo import compute_score, normal_form as normalize_final_answer
from lockstep.verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]
