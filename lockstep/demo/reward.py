"""The demo's reward function. A copy lies in every run's folder; `custom_reward_function.path` names it."""

import re
from typing import Any

FORM = re.compile(r"=(\d{3})")
"""The wanted form: the sign, then the number in three digits, then nothing."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 for the right number in the wanted form, else 0.

    acc:  the same number, which validation reports as accuracy.
    form: whether the answer has the wanted form, right or wrong.
    """
    match = FORM.fullmatch(solution_str)
    right = float(match is not None and int(match.group(1)) == int(ground_truth))
    return {"score": right, "acc": right, "form": float(match is not None)}
