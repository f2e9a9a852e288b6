"""The demo's reward function. Each run has a copy in its folder, set as `custom_reward_function.path`."""

import re
from typing import Any

FORM = re.compile(r"=(\d{3})")
"""The answer format: an equals sign and a three-digit number."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 for the correct number in the correct format, else 0.

    acc:  the same value, reported by validation as accuracy.
    form: whether the format is correct.
    """
    match = FORM.fullmatch(solution_str)
    right = float(match is not None and int(match.group(1)) == int(ground_truth))
    return {"score": right, "acc": right, "form": float(match is not None)}
