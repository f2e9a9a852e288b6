"""A scorer of the data source `example/*`: 1 if the answer has the right number, 0.1 for any number.

custom_reward_function.reward_kwargs.scorer=examples/plugins/scorer.py:last_number
"""

import re

from lockstep.rewards.default import SCORERS


@SCORERS.register("example/*")
def last_number(solution_str, ground_truth):
    """The model's answer and the row's reward_model.ground_truth -> a number, or a dict with `score`."""
    numbers = re.findall(r"-?\d+", solution_str)
    return {"score": float(numbers[-1] == ground_truth) or 0.1 if numbers else 0.0, "found": float(bool(numbers))}
