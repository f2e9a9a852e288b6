r"""Competition math, scored +1 or -1: the text after the last `Answer:`, compared after normalisation.

Without such a line the last `\boxed{}` must equal the ground truth exactly; `strict_box_verify` checks only that.
Intended for integer answers (DAPO-Math-17k, AIME): `\dfrac` does not equal `\frac` here, nor does `042` equal `42`.
The normal form is Minerva's (arXiv 2206.14858, appendix D).
"""

import re
from typing import Any

from lockstep.rewards.scorers.latex import closing_brace

TAIL_CHARS = 300
BOX_TAIL_CHARS = 100
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
NO_ANSWER = "[INVALID]"
BOX = r"\boxed{"

REWRITES = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
"""Applied in this order, then the removals in theirs: some words contain others."""

REMOVED_WORDS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples"),
)
REMOVED_LATEX = (
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """`score` is +1 or -1, `acc` whether the answer is correct, `pred` the answer.

    pause_tokens_index: four positions; the search for the box starts 100 characters before the last one.
    """
    tail = solution_str[-TAIL_CHARS:]
    gold = str(ground_truth)
    lines = [] if strict_box_verify else ANSWER_LINE.findall(tail)
    pred: str | None
    if lines:
        pred = normal_form(lines[-1])
        correct = pred == normal_form(gold)
    else:
        start = -BOX_TAIL_CHARS if pause_tokens_index is None else pause_tokens_index[3] - BOX_TAIL_CHARS
        pred = _last_boxed(tail[start:])
        correct = pred == gold
        if pred is None and not strict_box_verify:
            pred = NO_ANSWER
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def normal_form(answer: str) -> str:
    """The normal form of one answer: no words and units, braces around short arguments, digits without commas."""
    answer = answer.rpartition("=")[2]
    for before, after in (*REWRITES, *((word, "") for word in (*REMOVED_WORDS, *REMOVED_LATEX))):
        answer = answer.replace(before, after)
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind(BOX)
    end = closing_brace(text, start) if start >= 0 else None
    return None if end is None else text[start + len(BOX) : end]
