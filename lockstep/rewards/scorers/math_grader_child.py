"""The grader's child process: answers questions of `MathGrader` (`grader_process` has the loop).

Answers are data here too: math-verify gets expressions from `parse_expression` and from the LaTeX grammar of latex2sympy2,
and `close_generated_code` closes the ways from text to `eval` and `exec` in sympy.
"""

import functools
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import math_verify.parser
import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.parsing import sympy_parser

from lockstep.rewards.scorers.expression import MAX_DEPTH, is_small, parse_expression
from lockstep.rewards.scorers.symbolic import agree_strictly, agree_within_tolerance

MAX_STEPS = 3
"""Limit on the CPU time of a question, in steps: math-verify makes up to two parses and four comparisons."""


class QuestionTimeoutError(BaseException):
    """Not an Exception, so that sympy's own handlers do not catch it."""


def equal(gold: str, answer: str, timeout_s: int) -> list[bool]:
    """Compare two LaTeX answers by math-verify."""
    if is_deep(answer):
        return [False]
    golds, answers = (parse(rf"\boxed{{{text}}}", parsing_timeout=timeout_s) for text in (gold, answer))
    return [_verified(golds, answers, timeout_s)]


def found(gold: str, text: str, timeout_s: int) -> list[bool]:
    """Compare a LaTeX answer with the whole text of a solution by math-verify."""
    golds = parse(rf"\boxed{{{gold}}}", [LatexExtractionConfig()], parsing_timeout=timeout_s)
    answers = parse(text, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=timeout_s)
    return [_verified(golds, answers, timeout_s)]


def _verified(golds: list[Any], answers: list[Any], timeout_s: int) -> bool:
    if all(isinstance(value, str) or is_small(value) for value in (*golds, *answers)):
        return bool(verify(golds, answers, timeout_seconds=timeout_s))
    # Evaluating `9^{9^{9}}` would take hours: it only equals the same expression.
    return any(type(gold) is type(answer) and bool(gold == answer) for gold in golds for answer in answers)


def agreement(gold: str, answer: str, timeout_s: int) -> list[bool]:
    """Compare two answers by the rules of `symbolic`: [strict, within tolerance]."""
    strict = _limited(agree_strictly, gold, answer, timeout_s)
    return [strict, strict or _limited(agree_within_tolerance, gold, answer, timeout_s)]


def _limited(agree: Callable[[str, str], bool], gold: str, answer: str, timeout_s: int) -> bool:
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        return agree(gold, answer)
    except (QuestionTimeoutError, RecursionError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(signum: int, frame: Any) -> None:
    raise QuestionTimeoutError


def is_deep(text: str) -> bool:
    """Whether parentheses of any kind are nested deeper than in an answer; the LaTeX parser is slow on them."""
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth > MAX_DEPTH:
            return True
    return False


TASKS: dict[str, Callable[[str, str, int], list[bool]]] = {"equal": equal, "found": found, "agreement": agreement}
NO_VERDICT = {"equal": [False], "found": [False], "agreement": [False, False]}


def reply_to(question: dict[str, Any]) -> dict[str, Any]:
    """The reply to one question; an answer that takes too long or too much memory is wrong."""
    task, timeout_s = question["task"], question["timeout_s"]
    signal.signal(signal.SIGPROF, _raise_timeout)
    # Repeated, in case sympy catches it in a destructor.
    signal.setitimer(signal.ITIMER_PROF, MAX_STEPS * timeout_s, 1)
    try:
        return {"value": TASKS[task](question["gold"], question["answer"], timeout_s)}
    except (QuestionTimeoutError, MemoryError, RecursionError):
        return {"value": NO_VERDICT[task]}
    except Exception as error:  # noqa: BLE001 (process boundary: the parent logs it)
        return {"error": repr(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def prepare() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    close_generated_code()
    found("1", r"\boxed{1}", 0)  # compiles the patterns of math-verify


def close_generated_code() -> None:
    """Give sympy and math-verify our parser for strings, and keep the names of an answer out of generated code."""
    sympy_parser.parse_expr = _parse_text  # behind sympify, and so behind Number("12"), which math-verify calls
    sympy_parser.eval_expr = _refuse_code  # behind the original parse_expr, for modules that have imported it
    math_verify.parser.parse_expr = _parse_text
    original = sympy.lambdify
    nameless = functools.partial(nameless_lambdify, sympy.lambdify)
    for module in list(sys.modules.values()):
        if getattr(module, "lambdify", None) is original:
            module.lambdify = nameless  # type: ignore[attr-defined]


def nameless_lambdify(
    generate: Callable[..., Any], args: Any, expr: Any, modules: Any = "mpmath", **options: Any
) -> Any:
    """sympy's lambdify, which compiles an expression's text, without the names in it; evalf of a sum calls it."""
    variables = list(args) if isinstance(args, (list, tuple)) else [args]
    if not isinstance(expr, sympy.Basic) or expr.has(AppliedUndef, sympy.MatrixSymbol):
        raise NotImplementedError("not a formula of numbers and variables")
    if expr.atoms(sympy.Symbol) - set(variables):
        raise NotImplementedError("further variables")  # the function would have no numeric value
    renamed = {variable: sympy.Dummy() for variable in variables}
    return generate(list(renamed.values()), expr.xreplace(renamed), modules, **options)


def _parse_text(text: str, *_: Any, evaluate: bool = True, **__: Any) -> sympy.Expr:
    return parse_expression(text, evaluate=evaluate)


def _refuse_code(*_: Any) -> Any:
    raise sympy.SympifyError("answers are not evaluated")
