"""verl.utils.reward_score.math_verify"""

from lockstep.rewards.scorers import math_verify


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """1 if the answer found in the text equals the ground truth, else 0. timeout_score: a timeout scores 0 here."""
    if timeout_score != 0:
        raise ValueError(f"timeout_score={timeout_score}: an answer that cannot be graded in time scores 0")
    return math_verify.compute_score(model_output, ground_truth)
