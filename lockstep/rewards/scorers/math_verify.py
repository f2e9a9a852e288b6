r"""math-verify on the whole solution: what it takes for the final answer equals the ground truth as mathematics.

It finds answers outside a `\boxed{}` too, even a bare number in prose; the `math` scorer reads the last box only.
"""

from lockstep.rewards.scorers.math_grader import GRADER


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 where the answer found in the text equals the ground truth, else 0; so too where finding it takes too long."""
    return float(GRADER.is_found(str(ground_truth), solution_str))
