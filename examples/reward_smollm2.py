"""The reward of grpo_smollm2_easy.sh: the correct number, plus a small bonus for the format."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FORM = re.compile(rf"#### {NUMBER.pattern}\s*")
FORM_SCORE = 0.1


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 if the last number is the ground truth, plus `FORM_SCORE` if the answer ends with `####` and a number.

    acc:  whether the number is correct, reported by validation as accuracy.
    form: whether the format is correct.
    """
    numbers = NUMBER.findall(solution_str)
    right = bool(numbers) and abs(_value(numbers[-1]) - _value(ground_truth)) < 1e-4
    last_line = solution_str.rstrip().rpartition("\n")[2]
    form = FORM.fullmatch(last_line) is not None and solution_str.count("####") == 1
    return {"score": right + FORM_SCORE * form, "acc": float(right), "form": float(form)}


def _value(number: str) -> float:
    return float(number.replace(",", ""))
