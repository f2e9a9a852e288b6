r"""Mathematical equality in a sandboxed child process, so that no answer can harm or block the trainer.

sympy keeps a process busy for hours on some answers, and its time limits (SIGALRM) work in a main thread only. So questions
go to a child (`math_grader_child`) without environment, network, files of the user and the Lockstep package, and with
limits on memory and time:

    MathGrader.ask --{"task", "gold", "answer", ...} line--> child --{"value": [bool, ...]} or {"error": str} line--> verdicts

Lines are JSON. The child is not trusted: only booleans are read from it, and a child that breaks the protocol, exceeds a
limit or dies is replaced; the answer then counts as wrong.
"""

import atexit
import functools
import logging
import os
from typing import Any, Literal, NamedTuple

from lockstep.rewards.sandbox import Limits, Sandbox, SandboxedProcess, isolation
from lockstep.rewards.sandbox.process import VARIABLE
from lockstep.rewards.scorers import grader_process
from lockstep.rewards.scorers.grader_process import GraderProcess, ProtocolError, start_child

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 3
"""Limit for one parse or comparison in the child."""
REPLY_TIMEOUT_S = 20.0
"""After this time the child counts as stuck, for example in a long computation in C that ignores its own limits."""
MAX_ANSWER_CHARS = 10_000
"""Longer answers are wrong; a whole solution, in which math-verify searches for the answer, may be longer."""
LIMITS = Limits(cpu_s=None, wall_s=None, memory_mb=2048, file_mb=16, processes=4, open_files=64)

MODULES = ("expression", "latex", "latex_text", "symbolic", "math_grader_child")
BOOTSTRAP = grader_process.BOOTSTRAP.replace("CHILD", "math_grader_child")


class Agreement(NamedTuple):
    """strict: equal as text or as sympy expressions; within_tolerance: also as numbers within 1e-4."""

    strict: bool
    within_tolerance: bool


Task = Literal["equal", "found", "agreement"]
NUM_VERDICTS: dict[Task, int] = {"equal": 1, "found": 1, "agreement": 2}


class MathGrader:
    """Questions to the child; an answer that it gives no verdict on is wrong."""

    def __init__(self) -> None:
        self._process = GraderProcess(lambda: _start())

    def is_equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds `answer` equal to `gold`; False on timeout."""
        return self.ask("equal", gold, answer) == [True]

    def is_found(self, gold: str, text: str) -> bool:
        """Whether the answer that math-verify extracts from a whole text equals `gold`."""
        return self.ask("found", gold, text) == [True]

    def agreement(self, gold: str, answer: str) -> Agreement:
        """Compare `answer` with `gold` by the rules of `lockstep.rewards.scorers.symbolic`."""
        if len(answer) > MAX_ANSWER_CHARS:
            return Agreement(False, False)
        return Agreement(*(self.ask("agreement", gold, answer) or (False, False)))

    def ask(self, task: Task, gold: str, answer: str) -> list[bool] | None:
        """The child's verdicts; None, with a warning, if it gave none."""
        question: dict[str, str | int] = {"task": task, "gold": gold, "answer": answer, "timeout_s": STEP_TIMEOUT_S}
        try:
            return _verdicts(self._process.ask(question, REPLY_TIMEOUT_S), NUM_VERDICTS[task])
        except (EOFError, TimeoutError, ProtocolError) as error:
            self.close()
            logger.warning("the math grader failed on %.200r: %s; the answer counts as wrong", answer, error)
            return None

    def close(self) -> None:
        """Stop the child; the next question starts it again."""
        self._process.close()


def _start() -> SandboxedProcess:
    """Start a child and wait until it has imported sympy."""
    return start_child(_sandbox(), "the math grader", BOOTSTRAP, MODULES)


@functools.cache
def _sandbox() -> Sandbox:
    if os.environ.get(VARIABLE, "auto") == "auto" and isolation() == "none":
        logger.warning(
            "No sandbox works on this machine: the math grader, which parses answers without running them, is only limited "
            "in time, memory and system calls"
        )
        return Sandbox(LIMITS, form="none")
    return Sandbox(LIMITS)


def _verdicts(value: Any, num_verdicts: int) -> list[bool]:
    if not isinstance(value, list) or [type(verdict) for verdict in value] != [bool] * num_verdicts:
        raise ProtocolError(f"unexpected reply {str(value)[:200]!r}")
    return value


GRADER = MathGrader()
"""The grader of this process."""
atexit.register(GRADER.close)
