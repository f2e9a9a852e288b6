"""GSM8K: the answer is the number after `####` (strict) or the last number of the solution (flexible)."""

import re
from typing import Literal

Method = Literal["strict", "flexible"]

# The answer is at the end; searching only the tail is cheap on long responses.
TAIL_CHARS = 300
NUMBER = r"-?[0-9.,]+"
MARKED_NUMBER = re.compile(rf"#### ({NUMBER})")
ANY_NUMBER = re.compile(NUMBER)


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The last answer in the text as a string, or None.

    Strict requires exactly one space after `####` and removes thousands separators. Flexible returns the number as
    written, so `1,000` does not equal a ground truth of `1000`.
    """
    tail = solution_str[-TAIL_CHARS:]
    if method == "strict":
        marked = MARKED_NUMBER.findall(tail)
        return marked[-1].replace(",", "") if marked else None
    if method == "flexible":
        numbers = [number for number in ANY_NUMBER.findall(tail) if number not in (".", ",")]
        return numbers[-1] if numbers else None
    raise ValueError(f"method={method!r}: must be strict or flexible")


def compute_score(
    solution_str: str, ground_truth: str, method: Method = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the correct answer, `format_score` for a wrong one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
