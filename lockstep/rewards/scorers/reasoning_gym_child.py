"""The child process of the reasoning-gym scorer: makes a problem again and scores an answer to it.

Some scorers of the package call `eval` and sympy's `parse_expr` on answers. Here they get a parser of literals and our grammar of
expressions in their place, so an answer is data, and cannot choose its own score.
"""

import ast
import functools
import hashlib
import json
import re
import signal
import sys
from typing import Any

import sympy
from sympy.parsing import sympy_parser

from lockstep.rewards.scorers.expression import NotAnExpressionError, parse_expression

LITERALS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
"""Modules that evaluate an answer which is a list."""
NOT_FINITE = re.compile(r"nan|inf")


class AnswerTimeoutError(BaseException):
    """Not an Exception, so that the package's own handlers do not catch it."""


@functools.lru_cache(maxsize=64)
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))


@functools.lru_cache(maxsize=1024)
def _problem(task: str, options: str, index: int) -> Any:
    return _dataset(task, options)[index]


def score(task: str, options: dict[str, Any], index: int, question: str, answer: str) -> float:
    """The package's score of an answer to problem `index`; 0 if it cannot be read. question: digest of the row's question."""
    key = json.dumps(options, sort_keys=True)
    dataset, entry = _dataset(task, key), _problem(task, key, index)
    if hashlib.sha256(entry["question"].encode()).hexdigest()[:16] != question:
        raise ValueError("the problem cannot be made again: its question differs from that of the row")
    if task == "complex_arithmetic" and NOT_FINITE.search(answer.lower()):
        return 0.0  # the package's distance to NaN counts as none
    try:
        return float(dataset.score_answer(answer, entry))
    except (NotAnExpressionError, SyntaxError, AnswerTimeoutError, RecursionError, MemoryError):
        return 0.0
    except Exception:  # noqa: BLE001 (boundary to the package: an answer that its scorer cannot read)
        dataset.score_answer(entry["answer"], entry)  # if this raises too, it is not the answer's fault
        return 0.0


def reply_to(question: dict[str, Any]) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_REAL, question.pop("timeout_s"))
    try:
        return {"value": score(**question)}
    except AnswerTimeoutError:
        return {"error": "the problem could not be made in time"}
    except Exception as error:  # noqa: BLE001 (process boundary: the parent reports it)
        return {"error": repr(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(signum: int, frame: Any) -> None:
    raise AnswerTimeoutError


def prepare() -> None:
    """Import the package, and replace `eval` and `parse_expr` where it calls them on answers."""
    import reasoning_gym  # noqa: F401

    signal.signal(signal.SIGALRM, _raise_timeout)
    originals = (sympy.parse_expr, sympy_parser.parse_expr)
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and getattr(module, "parse_expr", None) in originals:
            module.parse_expr = _parse_text  # type: ignore[attr-defined]
        if name.startswith("reasoning_gym.") and name.rsplit(".", 1)[-1] in LITERALS:
            module.eval = ast.literal_eval  # type: ignore[attr-defined]
    sympy.parse_expr = sympy_parser.parse_expr = _parse_text


def _parse_text(text: Any, *_: Any, evaluate: bool = True, **__: Any) -> sympy.Expr:
    return parse_expression(str(text), evaluate=evaluate)  # the package also passes expressions of its own
