r"""PRIME's math scorer: extracts the answer from prose too, and compares as text, by sympy and as a number within 1e-4.

The most lenient of the math scorers: `0.5`, `50` and `50\%` are the same answer. `lockstep.rewards.scorers.symbolic`
has the comparison; it runs in the grader's process.
"""

from lockstep.rewards.scorers.latex import closing_brace
from lockstep.rewards.scorers.math_grader import GRADER

BEFORE_ANSWER = ("answer:", "answer is", "answers are")
AFTER_ANSWER = ("is answer", "is the answer", "are answers", "are the answers")
LEAD_INS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


def compute_score(solution_str: str, ground_truth: str) -> tuple[bool, bool, str]:
    r"""Whether the answer is correct, whether the format is, and the answer.

    The format counts as correct if the answer matches without numeric tolerance, or the text has `Step 2:` and a `\box`.
    """
    text, gold = str(solution_str), str(ground_truth)
    answer = extract_answer(text)
    strict, within_tolerance = GRADER.agreement(gold, answer)
    if strict:
        return True, True, answer
    return within_tolerance, "Step 2:" in text and r"\box" in text, answer


def extract_answer(text: str) -> str:
    """The final answer: after the last "answer is", in the last box, without lead-in words."""
    for marker in BEFORE_ANSWER:
        text = _after_last(text, marker)
    for marker in AFTER_ANSWER:
        position = text.lower().rfind(marker)
        text = text if position < 0 else text[:position].strip()
    text = _last_boxed(text) or text
    if ". " in text:
        text = text[: text.rindex(". ")].strip()
    for marker in LEAD_INS:
        text = _after_last(text, marker)
    return text


def _after_last(text: str, marker: str) -> str:
    position = text.lower().rfind(marker)
    return text if position < 0 else text[position + len(marker) :].strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed")
    if start < 0:
        start = text.rfind(r"\fbox")
    opened = text.find("{", start) if start >= 0 else -1
    end = closing_brace(text, opened) if opened >= 0 else None
    return None if end is None else text[opened + 1 : end].strip()
