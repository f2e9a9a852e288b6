"""Code: the fraction of tests that the Python program in a response passes, run in a separate process.

    response --last ```python block--> program --code_judge process--> outcome per input --compare--> verdicts, score

The judge process has its own session, memory and time limits and, if the kernel allows it, no network, and leaves no
processes behind. It can read whatever the trainer's user can read: run untrusted models in a container.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

JUDGE = Path(__file__).with_name("code_judge.py")
TEST_TIMEOUT_S = 5.0
MEMORY_MB = 1024
NUM_PARTIAL_TESTS = 10
START_TIMEOUT_S = 30.0
"""Start-up time of the judge on a loaded machine."""
REL_TOLERANCE, ABS_TOLERANCE = 1e-5, 1e-8

Verdict = dict[str, Any]
"""`{"passed": bool, "error": str | None}`."""


def compute_score(
    solution_str: str,
    ground_truth: str | dict[str, Any],
    continuous: bool = False,
    test_timeout_s: float = TEST_TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
) -> tuple[float, list[Verdict]]:
    """1 if all tests pass; else 0, or with `continuous` the fraction of the first ten tests that pass.

    ground_truth: `{"inputs": [...], "outputs": [...]}` as dict or JSON. With `fn_name` each input is a list of arguments,
    or text with one JSON value per line, and the function (or method of `class Solution`) must return the output. Without
    it the inputs go to the program's standard input and the outputs are compared with what it prints.
    """
    tests = read_tests(ground_truth)
    num_always = min(NUM_PARTIAL_TESTS, len(tests["inputs"])) if continuous else 0
    verdicts = judge(extract_program(solution_str), tests, num_always, test_timeout_s, memory_mb)
    passed = sum(verdict["passed"] for verdict in verdicts)
    if passed == len(tests["inputs"]):
        return 1.0, verdicts
    if not continuous:
        return 0.0, verdicts
    if all(verdict["passed"] for verdict in verdicts[:num_always]):
        return passed / len(tests["inputs"]), verdicts  # a later test failed
    return sum(verdict["passed"] for verdict in verdicts[:num_always]) / num_always, verdicts


def extract_program(solution_str: str) -> str:
    """The last ```python block, else the text before any fence."""
    return solution_str.split("```python")[-1].split("```")[0]


def read_tests(ground_truth: str | dict[str, Any]) -> dict[str, Any]:
    """Parse the tests and check that there is one output per input."""
    tests = ground_truth if isinstance(ground_truth, dict) else json.loads(ground_truth)
    if not isinstance(tests, dict) or "inputs" not in tests or "outputs" not in tests:
        raise ValueError("ground_truth of a program must have inputs and outputs")
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; expected one output per input"
        )
    return {"inputs": inputs, "outputs": outputs, "fn_name": tests.get("fn_name")}


def judge(program: str, tests: dict[str, Any], num_always: int, test_timeout_s: float, memory_mb: int) -> list[Verdict]:
    """One verdict per test; after the first `num_always` tests, stop when the program fails to answer."""
    task = {
        "program": program,
        "inputs": tests["inputs"],
        "fn_name": tests["fn_name"],
        "num_always": num_always,
        "test_timeout_s": test_timeout_s,
        "memory_mb": memory_mb,
    }
    outcomes = run_judge(task, START_TIMEOUT_S + (test_timeout_s + 1.0) * len(tests["inputs"]))
    agrees = result_agrees if tests["fn_name"] else output_agrees
    return [verdict(outcome, wanted, agrees) for outcome, wanted in zip(outcomes, tests["outputs"])]


def verdict(outcome: dict[str, Any], wanted: Any, agrees: Callable[[Any, Any], bool]) -> Verdict:
    if "error" in outcome:
        return {"passed": False, "error": str(outcome["error"])}
    if agrees(outcome.get("result"), wanted):
        return {"passed": True, "error": None}
    return {"passed": False, "error": f"got {str(outcome.get('result'))[:100]!r}, expected {str(wanted)[:100]!r}"}


def run_judge(task: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """Run the judge and return its outcomes; its session is always killed at the end."""
    with tempfile.TemporaryDirectory(prefix="lockstep-judge-", ignore_cleanup_errors=True) as folder:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        process = subprocess.Popen(
            [sys.executable, "-I", str(JUDGE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            reply, _ = process.communicate(json.dumps(task, default=_plain).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            reply = b""
        finally:
            _kill_session(process)
    try:
        return list(json.loads(reply))
    except ValueError:
        return [{"error": "the judge exited without an outcome"}]


def result_agrees(result: Any, wanted: Any) -> bool:
    """Compare a returned value with the expected one, as JSON; a one-element list matches its element."""
    expected = json.loads(json.dumps(_read_json(wanted), default=_plain))
    if _equal(result, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0])


def output_agrees(output: str, wanted: Any) -> bool:
    """Compare word by word and line by line; decimal numbers may differ by rounding."""
    text = wanted if isinstance(wanted, str) else "\n".join(map(str, wanted))
    lines, expected = ([line.split() for line in side.rstrip().split("\n")] for side in (output, text))
    return len(lines) == len(expected) and all(
        len(line) == len(other) and all(map(_same_word, line, other)) for line, other in zip(lines, expected)
    )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, float) or isinstance(right, float):
        numbers = all(isinstance(side, (int, float)) for side in (left, right))
        return numbers and math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


def _same_word(word: str, other: str) -> bool:
    if word == other:
        return True
    if "." not in word + other:
        return False
    try:
        return math.isclose(float(word), float(other), rel_tol=REL_TOLERANCE, abs_tol=ABS_TOLERANCE)
    except ValueError:
        return False


def _read_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _plain(value: Any) -> Any:
    """Convert numpy arrays and numbers, which parquet returns."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"ground_truth contains a {type(value).__name__}, which is not JSON")
