r"""MATH as verl scores it: the last `\boxed{}` must equal the ground truth after text normalisation.

Selected by `scorer: math_reward`; the `math` scorer, which compares mathematically, is the default for the MATH sources.
"""

from lockstep.rewards.scorers.latex import NoNormalFormError, closing_brace, normal_form

OPEN_BOX = r"\boxed "


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 if the last boxed answer has the same normal form as the ground truth, else 0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and is_equivalent(answer, str(ground_truth)))


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`; `\boxed 5$` anywhere in the text takes precedence, `\fbox` is ignored."""
    if OPEN_BOX in text:
        return text.rpartition(OPEN_BOX)[2].split("$")[0]
    start = text.rfind(r"\boxed")
    end = closing_brace(text, start) if start >= 0 else None
    if end is None or not text.startswith(r"\boxed{", start):
        return None
    return text[start + len(r"\boxed{") : end]


def is_equivalent(answer: str, ground_truth: str) -> bool:
    """Equality of the normal forms, or of the texts if one of them has none."""
    try:
        return normal_form(answer) == normal_form(ground_truth)
    except NoNormalFormError:
        return answer == ground_truth
