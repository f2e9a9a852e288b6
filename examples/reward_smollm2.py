"""The reward of grpo_smollm2_easy.sh: a right number, and a little for the form in which it is asked for."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FORM = re.compile(rf"#### {NUMBER.pattern}\s*")
FORM_SCORE = 0.1


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 if the last number is the ground truth, and `FORM_SCORE` if the answer ends with `####` and a number.

    acc:  the first of the two alone, which validation reports as accuracy.
    form: whether the answer has the form, right or wrong.
    """
    numbers = NUMBER.findall(solution_str)
    right = bool(numbers) and abs(_value(numbers[-1]) - _value(ground_truth)) < 1e-4
    last_line = solution_str.rstrip().rpartition("\n")[2]
    form = FORM.fullmatch(last_line) is not None and solution_str.count("####") == 1
    return {"score": right + FORM_SCORE * form, "acc": float(right), "form": float(form)}


def _value(number: str) -> float:
    return float(number.replace(",", ""))
