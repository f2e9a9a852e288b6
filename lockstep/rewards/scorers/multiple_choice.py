r"""Multiple choice: the letter in the last `\boxed{}` or `<answer>`, or after the last "answer is" or "Answer:"."""

import re

from lockstep.rewards.scorers.math import last_boxed
from lockstep.rewards.scorers.search_r1_like_qa_em import extract_solution

# `*+` does not give characters back, so that the time is linear in the length of a run of spaces.
LETTER = r"[\s*_$({\[]*+(?:\\(?:text|textbf|mathrm|mathbf)\{)?[\s(]*+([A-Z])(?![A-Za-z0-9'])"
MARKED = re.compile(rf"\b(?i:answer(?:\s++is)?|option|choice)\s*+(?::|\bis\b)?{LETTER}")


def extract_choice(solution_str: str) -> str | None:
    """The chosen letter; None if there is a box or tag but it contains no letter."""
    tagged = extract_solution(solution_str)
    final = last_boxed(solution_str) if tagged is None else tagged
    if final is not None:
        match = re.match(LETTER, final)
        return match[1] if match else None
    marked = MARKED.findall(solution_str)
    return marked[-1] if marked else None


def compute_score(
    solution_str: str, ground_truth: str | int, format_score: float = 0.0, score: float = 1.0
) -> dict[str, object]:
    """`score` for the correct letter, `format_score` for a wrong one, 0 for none; with `acc` and `pred`.

    ground_truth: the letter, or the option's number from 0.
    """
    gold = chr(ord("A") + ground_truth) if isinstance(ground_truth, int) else ground_truth.strip(" ().").upper()
    if not re.fullmatch("[A-Z]", gold):
        raise ValueError(
            f"ground_truth={ground_truth!r}: multiple choice expects a letter from A to Z, or a number from 0"
        )
    choice = extract_choice(solution_str)
    reward = 0.0 if choice is None else score if choice == gold else format_score
    return {"score": reward, "acc": choice == gold, "pred": choice}
