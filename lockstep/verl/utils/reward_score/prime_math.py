"""verl.utils.reward_score.prime_math"""

from lockstep.rewards.scorers import prime_math


def compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    """(correct, well-formed, the answer)."""
    return prime_math.compute_score(model_output, ground_truth)
