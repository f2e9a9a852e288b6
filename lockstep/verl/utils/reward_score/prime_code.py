"""verl.utils.reward_score.prime_code"""

from typing import Any

from lockstep.rewards.scorers import prime_code


def compute_score(
    completion: str, test_cases: str | dict[str, Any], continuous: bool = False
) -> tuple[float, list[Any]]:
    """(score, one verdict per test)."""
    score, verdicts = prime_code.compute_score(completion, test_cases, continuous)
    return score, list(verdicts)
