r"""LaTeX answers as text: brace matching, and the normal form of MATH answers.

The normal form is the one used to grade the MATH dataset (arXiv 2103.03874): spacing, sizes, units, currency and percent
signs are removed, `\frac12` and `1/2` become `\frac{1}{2}`. It is purely textual: `2\sqrt{3}` is not `\sqrt{12}`.
"""

import re

REWRITES = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\$", ""),
)
UNIT = r"\text{ "


class NoNormalFormError(ValueError):
    """The rules cannot parse the text; it is compared unchanged."""


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the first one opened at or after `start`; None if it is never closed."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    return None


def normal_form(text: str) -> str:
    """The normal form of one MATH answer; raises NoNormalFormError if it has none."""
    for before, after in REWRITES:
        text = text.replace(before, after)
    if UNIT in text:
        text, *units = text.split(UNIT)
        if len(units) > 1:
            raise NoNormalFormError("several units")
    text = text.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # `x = 5` is 5
        text = sides[1]
    text = _brace_fractions(_brace_roots(text).replace(" ", ""))
    return r"\frac{1}{2}" if text == "0.5" else _slash_as_fraction(text)


def _brace_roots(text: str) -> str:
    if re.search(r"\\sqrt(?=\\sqrt|\Z)", text):
        raise NoNormalFormError("a root of nothing")
    return re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text)


def _brace_fractions(text: str) -> str:
    head, *tails = text.split(r"\frac")
    parts = [head]
    for tail in tails:
        if not tail:
            raise NoNormalFormError("a fraction of nothing")
        if tail.startswith("{"):
            parts.append(tail)
        elif len(tail) == 1:
            return text
        else:
            numerator, denominator, rest = tail[0], tail[1], tail[2:]
            bottom = "{" if denominator == "{" else f"{{{denominator}}}"
            parts.append(f"{{{numerator}}}{bottom}{rest}")
    return r"\frac".join(parts)


def _slash_as_fraction(text: str) -> str:
    match = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return rf"\frac{{{match[1]}}}{{{match[2]}}}" if match else text
