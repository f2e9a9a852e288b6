r"""MATH as the public system scores it: the last `\boxed{}`, equal to the ground truth as normalised text.

Selected by `scorer: math_reward`; the `math` scorer, which compares by mathematics, is the default of the MATH sources.
"""

from lockstep.rewards.scorers.latex import NoNormalFormError, closing_brace, normal_form

OPEN_BOX = r"\boxed "


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 where the last boxed answer has the normal form of the ground truth, else 0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and is_equivalent(answer, str(ground_truth)))


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; `\boxed 5$` anywhere in the text goes before, `\fbox` does not count."""
    if OPEN_BOX in text:
        return text.rpartition(OPEN_BOX)[2].split("$")[0]
    start = text.rfind(r"\boxed")
    end = closing_brace(text, start) if start >= 0 else None
    if end is None or not text.startswith(r"\boxed{", start):
        return None
    return text[start + len(r"\boxed{") : end]


def is_equivalent(answer: str, ground_truth: str) -> bool:
    """Equality of the normal forms, or of the texts where one of them has none."""
    try:
        return normal_form(answer) == normal_form(ground_truth)
    except NoNormalFormError:
        return answer == ground_truth
