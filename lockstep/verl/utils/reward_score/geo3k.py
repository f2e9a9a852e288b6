"""verl.utils.reward_score.geo3k"""

from lockstep.rewards.scorers import geo3k


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    return geo3k.compute_score(predict_str, ground_truth, use_boxed, format_score)
