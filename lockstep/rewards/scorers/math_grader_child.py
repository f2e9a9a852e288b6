"""The grader's child process: answers questions of `MathGrader` from stdin until stdin closes."""

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from lockstep.rewards.scorers.symbolic import agree_strictly, agree_within_tolerance

STEP_TIMEOUT_S = 3
"""Limit for one parse and for one comparison."""
MEMORY_BYTES = 4 * 1024**3


class StepTimeoutError(BaseException):
    """Not an Exception, so that sympy's own handlers do not catch it."""


def equal(gold: str, answer: str) -> bool:
    """Compare two LaTeX answers by math-verify."""
    golds, answers = (parse(rf"\boxed{{{text}}}", parsing_timeout=STEP_TIMEOUT_S) for text in (gold, answer))
    return bool(verify(golds, answers, timeout_seconds=STEP_TIMEOUT_S))


def found(gold: str, text: str) -> bool:
    """Compare a LaTeX answer with the whole text of a solution by math-verify."""
    golds = parse(rf"\boxed{{{gold}}}", [LatexExtractionConfig()], parsing_timeout=STEP_TIMEOUT_S)
    answers = parse(text, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=STEP_TIMEOUT_S)
    return bool(verify(golds, answers, timeout_seconds=STEP_TIMEOUT_S))


def agreement(gold: str, answer: str) -> tuple[bool, bool]:
    """Compare two answers by the rules of `symbolic`: (strict, within tolerance)."""
    strict = _limited(agree_strictly, gold, answer)
    return strict, strict or _limited(agree_within_tolerance, gold, answer)


def _limited(agree: Callable[[str, str], bool], gold: str, answer: str) -> bool:
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, STEP_TIMEOUT_S)
    try:
        return agree(gold, answer)
    except StepTimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(signum: int, frame: Any) -> None:
    raise StepTimeoutError


TASKS: dict[str, Callable[[str, str], Any]] = {"equal": equal, "found": found, "agreement": agreement}


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; the child exits when stdin closes
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        try:
            reply: dict[str, Any] = {"value": TASKS[question["task"]](question["gold"], question["answer"])}
        except (MemoryError, RecursionError):
            reply = {"value": None}
        except Exception as error:  # noqa: BLE001 (process boundary: the parent raises it)
            reply = {"error": repr(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
