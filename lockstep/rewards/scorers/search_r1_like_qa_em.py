"""Search QA: the text in the last `<answer>` tags must equal an accepted answer, ignoring case and articles."""

import re
import string
from typing import Any

OPEN, CLOSE = "<answer>", "</answer>"
MAX_TAGS = 10
"""A response with more answer tags than this is guessing and gets a quarter of the score."""


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if the last answer is accepted, `format_score` for a wrong one, 0 for none.

    ground_truth: `{"target": answer or list of answers}`, or the target itself. `method` has no effect; callers pass it.
    """
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    if normal_form(answer) not in map(normal_form, accepted_answers(ground_truth)):
        return format_score
    num_tags = max(solution_str.count(OPEN), solution_str.count(CLOSE))
    return score / 4 if num_tags > MAX_TAGS else score


def compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Like `compute_score`, but an accepted answer may be a substring of the answer."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    given = normal_form(answer)
    return score if any(normal_form(target) in given for target in accepted_answers(ground_truth)) else format_score


def extract_solution(solution_str: str) -> str | None:
    """The text in the last answer tags."""
    answer, at = None, 0
    # One pass: a pattern would search the rest of the text after every opening tag.
    while (start := solution_str.find(OPEN, at)) >= 0 and (end := solution_str.find(CLOSE, start)) >= 0:
        answer, at = solution_str[start + len(OPEN) : end], end + len(CLOSE)
    return None if answer is None else answer.strip()


def accepted_answers(ground_truth: Any) -> list[str]:
    """The accepted answers as strings."""
    target = ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth
    return [target] if isinstance(target, str) else [str(answer) for answer in target]


def normal_form(text: str) -> str:
    """Lower case, no punctuation and articles, single spaces."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
