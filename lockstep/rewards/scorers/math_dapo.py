r"""Competition mathematics with a signed score: the text after the last `Answer:`, or else the last `\boxed{}`."""

import re
from typing import Any

from lockstep.rewards.scorers.math import is_equal, last_boxed

TAIL_CHARS = 300
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
NO_ANSWER = "[INVALID]"


def extract_answer(solution_str: str) -> str | None:
    """The final answer as LaTeX without its dollar signs, or None."""
    lines = ANSWER_LINE.findall(solution_str[-TAIL_CHARS:])
    if not lines:
        return last_boxed(solution_str)
    return last_boxed(lines[-1]) or lines[-1].strip().strip("$").strip()


def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """`score` is +1 or -1; `acc` says whether the answer is right and `pred` what it was."""
    answer = extract_answer(solution_str)
    correct = answer is not None and is_equal(str(ground_truth), answer)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": NO_ANSWER if answer is None else answer}
