r"""Whether two answers agree: as text, as sympy expressions, or as numbers within a tolerance.

agree_strictly          equal normal forms, or a difference that sympy simplifies to 0 (PRM800K's rules, arXiv 2305.20050)
agree_within_tolerance  as text, numbers within 1e-4 (also as percentages), tuples element by element, or expressions

Text becomes a sympy expression by `expression.parse_expression` only, never by sympy's own parser, which is `eval`.
simplify may take long on any expression, so both run in the grader's process with its limits.
"""

import math
import re

import sympy

from lockstep.rewards.scorers.expression import Dialect, NotAnExpressionError, parse_expression
from lockstep.rewards.scorers.latex import NoNormalFormError, normal_form
from lockstep.rewards.scorers.latex_text import latex_to_text

REL_TOLERANCE = 1e-4
MAX_CHARS = 1000
IN_TEXT = re.compile(r"^\\text\{(.+?)\}$")
UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard liter".split()  # noqa: SIM905
POWERS_OF_TEN = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
REDUCED_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
COSTLY_POWER = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")


def agree_strictly(gold: str, answer: str) -> bool:
    """Equal in one of two normal forms, or element by element under sympy; an integer only matches an integer."""
    if _math_form(gold) == _math_form(answer):
        return True
    gold, answer = _plain_form(gold), _plain_form(answer)
    if gold == answer:
        return True
    if not answer:
        return False
    golds, answers = _parts(gold), _parts(answer)
    if len(golds) != len(answers) or (len(golds) > 1 and (gold[0], gold[-1]) != (answer[0], answer[-1])):
        return False
    return bool(golds) and all(map(_part_agrees, golds, answers))


def _part_agrees(gold: str, answer: str) -> bool:
    if REDUCED_FRACTION.search(gold) and REDUCED_FRACTION.search(answer):
        return gold == answer  # 2/4 does not match 1/2
    if _is_integer(gold) != _is_integer(answer):
        return False
    difference = f"({gold})-({answer})"
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > 2 or COSTLY_POWER.search(difference):
        return False
    left, right = _parsed(gold, "implicit"), _parsed(answer, "implicit")
    return left is not None and right is not None and _is_zero(left - right)


def _math_form(text: str) -> str:
    text = text.strip()
    if match := IN_TEXT.search(text):
        text = match[1].strip()
    try:
        return normal_form(text)
    except NoNormalFormError:
        return text


def _plain_form(text: str) -> str:
    """Lower case, without currency and percent signs, units and LaTeX; integers without a fraction."""
    if match := IN_TEXT.search(text):
        text = match[1]
    text = re.sub(r"\s+", " ", text)  # LaTeX reads line breaks as spaces
    for sign in (r"\%", r"\$", "$", "%"):
        text = text.replace(sign, "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in POWERS_OF_TEN:
        text = text.replace(word, power)
    for unit in UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if _is_whole(text):
        text = str(round(float(text)))
    if "\\" in text:
        text = latex_to_text(re.sub(r"\\[td]?frac", r" \\frac", text)).strip()
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text).lower()  # 7 3/4 is 7+3/4
    return str(int(float(text.replace(",", "")))) if _is_integer(text) else text


def _is_whole(text: str) -> bool:
    try:
        number = float(text)
        return abs(number - round(number)) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _is_integer(text: str) -> bool:
    return _is_whole(_without_thousands_commas(text))


def _without_thousands_commas(text: str) -> str:
    while True:
        shorter = re.sub(r"(\d),(\d\d\d)($|\D)", r"\1\2\3", text)
        if shorter == text:
            return text
        text = shorter


def _parts(text: str) -> list[str]:
    """The elements of a tuple or interval, else the text itself."""
    text = _without_thousands_commas(text)
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not set("()[]") & set(text[1:-1]):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text] if text else []


def agree_within_tolerance(gold: str, answer: str) -> bool:
    """The lenient comparison; pi may also be evaluated as 3.14."""
    values_of_pi = (math.pi, 3.14) if r"\pi" in gold + answer else (math.pi,)
    try:
        return any(_close(gold, answer, pi) for pi in values_of_pi)
    except (ValueError, OverflowError):  # `_` after something that is not a number
        return False


def _close(gold_text: str, answer_text: str, pi: float = math.pi) -> bool:
    gold, answer = _value(gold_text, pi), _value(answer_text, pi)
    if isinstance(answer, str) and isinstance(gold, str):
        answer = answer[:MAX_CHARS]
        if answer.strip().lower() == gold.strip().lower() or answer.replace(" ", "") == gold.replace(" ", ""):
            return True
    numbers = _number(gold), _number(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return any(math.isclose(numbers[0] * scale, numbers[1], rel_tol=REL_TOLERANCE) for scale in (0.01, 1, 100))
    if answer == "":
        return False
    return _close_texts(str(gold).strip(), str(answer).strip())


def _close_texts(gold: str, answer: str) -> bool:
    if _equal_but_for_brackets(gold, answer):
        return True
    same_brackets = (
        answer[:1] in ("(", "[") and answer[-1:] in (")", "]") and gold[:1] + gold[-1:] == answer[0] + answer[-1]
    )
    if same_brackets and _all_close(gold[1:-1].split(","), answer[1:-1].split(",")):
        return True
    if "," in gold and "," in answer:
        golds, answers = ([part.strip() for part in text.split(",")] for text in (gold, answer))
        if len(golds) == len(answers):
            return _all_close(golds, answers)
    return _expressions_close(gold, answer)


def _equal_but_for_brackets(gold: str, answer: str) -> bool:
    in_square = answer.startswith("[") and answer.endswith("]") and not gold.startswith("(")
    in_round = answer.startswith("(") and answer.endswith(")") and not gold.startswith("[")
    if in_square or in_round:
        gold, answer = gold.strip("[]()"), answer.strip("[]()")
    without_brackets = str.maketrans("", "", "{}()")
    return gold.translate(without_brackets) == answer.translate(without_brackets)


def _all_close(golds: list[str], answers: list[str]) -> bool:
    return len(golds) == len(answers) and all(map(_close, golds, answers))


def _value(text: str, pi: float) -> str | float:
    """A number's text without `$` or `%`, the digits before a base, or the value of an expression with pi."""
    if re.match(r"\$\d+(\.\d+)?", text):
        return text[1:]
    if re.fullmatch(r"\d+(\.\d+)?\\?%\n?", text):
        return text.replace(r"\%", "").replace("%", "")
    if "_" in text:
        return int(float(text.split("_")[0]))
    if r"\pi" not in text:
        return text
    while r"\pi" in text:
        before, _, after = text.partition(r"\pi")
        text = f"{before}{'*' if before[-1:].isdigit() else '1*'}{pi}{after}"
    return _arithmetic(text)


def _arithmetic(text: str) -> str | float:
    """The value of an arithmetic expression, or the text unchanged."""
    if not re.fullmatch(r"[\d+\-*/(). ]+", text) or "**" in text or "//" in text:
        return text
    try:
        return float(parse_expression(text))
    except (NotAnExpressionError, TypeError):  # TypeError: a division by zero is no float
        return text


def _number(value: str | float) -> float | None:
    text = str(value)
    try:
        return float(text.replace("{,}", "") if "{,}" in text else text.replace(",", ""))
    except ValueError:
        return None


def _expressions_close(gold: str, answer: str) -> bool:
    left, right = _parsed(gold, "plain"), _parsed(answer, "plain")
    if left is not None and right is not None and _is_zero(left - right):
        return True
    left = _parsed(gold, "power") if left is None else left
    right = _parsed(answer, "power") if right is None else right
    if left is None or right is None:
        return False
    try:
        return math.isclose(sympy.N(left), sympy.N(right), rel_tol=REL_TOLERANCE)
    except Exception:  # noqa: BLE001 (sympy raises anything; TypeError if a variable is left)
        return False


def _parsed(text: str, dialect: Dialect) -> sympy.Expr | None:
    try:
        return parse_expression(text, dialect)
    except NotAnExpressionError:
        return None


def _is_zero(difference: sympy.Expr) -> bool:
    try:
        return bool(sympy.simplify(difference) == 0)
    except Exception:  # noqa: BLE001 (sympy raises anything on what it cannot simplify)
        return False
