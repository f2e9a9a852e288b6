"""reasoning-gym: an answer is scored by `score_answer` of its task, in a sandboxed child process.

The row says which problem it is (`extra_info.reasoning_gym`), and the child makes it again, so nothing of it needs to be stored.
"""

import atexit
import re
from typing import Any

from lockstep.rewards.sandbox import Limits, Sandbox, SandboxedProcess
from lockstep.rewards.scorers import grader_process
from lockstep.rewards.scorers.grader_process import GraderProcess, ProtocolError, start_child

ANSWER = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)
ANSWER_TIMEOUT_S = 15.0
REPLY_TIMEOUT_S = 20.0
"""After this time the child counts as stuck."""
MAX_ANSWER_CHARS = 10_000
LIMITS = Limits(cpu_s=None, wall_s=None, memory_mb=2048, file_mb=16, processes=4, open_files=64)
MODULES = ("expression", "reasoning_gym_child")
BOOTSTRAP = grader_process.BOOTSTRAP.replace("CHILD", "reasoning_gym_child")


def _start() -> SandboxedProcess:
    return start_child(Sandbox(LIMITS), "the grader of reasoning-gym", BOOTSTRAP, MODULES)


GRADER = GraderProcess(_start)
atexit.register(GRADER.close)


def extract_answer(solution_str: str) -> str:
    """The text in the last `<answer>`; the whole response if it has none."""
    tagged = ANSWER.findall(solution_str)
    return (tagged[-1] if tagged else solution_str).strip()


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """The task's score, from 0 to 1 for most of them; `acc` is 1 for a full score."""
    problem = extra_info.get("reasoning_gym")
    if problem is None:
        raise ValueError(
            "extra_info has no `reasoning_gym`: rows of data_source reasoning_gym/* are made by "
            "data.train_files=reasoning_gym:TASK"
        )
    answer = extract_answer(solution_str)
    score = 0.0
    if len(answer) <= MAX_ANSWER_CHARS:
        try:
            value = GRADER.ask({**problem, "answer": answer, "timeout_s": ANSWER_TIMEOUT_S}, REPLY_TIMEOUT_S)
        except (EOFError, TimeoutError, ProtocolError) as error:
            raise ValueError(f"reasoning-gym task {problem['task']}, problem {problem['index']}: {error}") from error
        if not isinstance(value, float):
            raise ValueError(f"reasoning-gym task {problem['task']}: unexpected score {value!r}")
        score = value
    return {"score": score, "acc": float(score >= 1.0), "pred": answer[:200]}
