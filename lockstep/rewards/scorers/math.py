r"""MATH: the last `\boxed{}` of the solution, compared with the ground truth by math-verify."""

import re
from functools import lru_cache

from lockstep.rewards.scorers.latex import closing_brace
from lockstep.rewards.scorers.math_grader import GRADER

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
SMALL_INTEGER = re.compile(r"-?[0-9]{1,18}")
MAX_ANSWER_CHARS = 2000


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 if the last boxed answer is mathematically equal to the ground truth, else 0."""
    answer = last_boxed(solution_str)
    gold = str(ground_truth)
    if answer is None or len(answer) > MAX_ANSWER_CHARS + len(gold):
        return 0.0
    return float(is_equal(gold, answer))


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, `\fbox{...}` or `\boxed x`; None without one or if its brace is not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0]
    end = closing_brace(text, start)
    return None if end is None else text[start + 1 : end].strip()


@lru_cache(maxsize=16384)
def is_equal(ground_truth: str, answer: str) -> bool:
    """Whether two LaTeX answers are mathematically equal; text that cannot be parsed must match exactly."""
    gold, given = "".join(ground_truth.split()), "".join(answer.split())
    if gold == given:
        return True
    if not gold or not given or len(given) > MAX_ANSWER_CHARS:
        return False
    # Most wrong answers are plain integers: no need to ask the grader.
    if SMALL_INTEGER.fullmatch(gold) and SMALL_INTEGER.fullmatch(given):
        return int(gold) == int(given)
    return GRADER.is_equal(ground_truth, answer)
