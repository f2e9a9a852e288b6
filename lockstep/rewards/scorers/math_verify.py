r"""math-verify on the whole solution: the answer it extracts must be mathematically equal to the ground truth.

It also finds answers outside a `\boxed{}`, even a bare number in prose; the `math` scorer reads only the last box.
"""

from lockstep.rewards.scorers.math_grader import GRADER


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 if the answer found in the text equals the ground truth, else 0, also on timeout."""
    return float(GRADER.is_found(str(ground_truth), solution_str))
