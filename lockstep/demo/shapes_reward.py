"""The demo's reward function for pictures. Each run has a copy in its folder, set as `custom_reward_function.path`."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """1 for the correct number at the end, whatever the list before it says, else 0.

    acc:      the same value, reported by validation as accuracy.
    careless: whether the number is wrong and that of all shapes of the colour.
    """
    number = solution_str.rpartition(": ")[2]
    right = float(number == ground_truth)
    careless = float(not right and number == extra_info["careless_answer"])
    return {"score": right, "acc": right, "careless": careless}
