r"""Geometry3K: 0.9 for a correct last `\boxed{}`, 0.1 for `<think>…</think>` before a box."""

from collections.abc import Iterable

from lockstep.rewards.scorers.latex import closing_brace
from lockstep.rewards.scorers.math_grader import GRADER

BOX = r"\boxed{"
THOUGHT_AND_BOX = ("<think>", "</think>", BOX, "}")


def compute_score(solution_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The weighted sum of both; `use_boxed: false` takes the whole text as the answer."""
    answer = _last_boxed(solution_str) if use_boxed else solution_str
    correct = answer is not None and GRADER.agreement(str(ground_truth), answer).strict
    well_formed = solution_str.startswith("<think>") and _in_order(solution_str, THOUGHT_AND_BOX)
    return (1.0 - format_score) * correct + format_score * well_formed


def _in_order(text: str, parts: Iterable[str]) -> bool:
    at = 0
    for part in parts:
        start = text.find(part, at)
        if start < 0:
            return False
        at = start + len(part)
    return True


def _last_boxed(text: str) -> str | None:
    start = text.rfind(BOX)
    end = closing_brace(text, start) if start >= 0 else None
    return None if end is None else text[start + len(BOX) : end].strip()
