"""Code: the fraction of tests that the Python program in a response passes, run in a sandbox.

    response --last ```python block--> program --judge in a sandbox--> outcome per test --compare--> verdicts, score

Three forms of tests: APPS (`inputs`, `outputs`, with `fn_name` or standard input), HumanEval (`test` with
`check(candidate)`, `entry_point`, `prompt`) and MBPP (`test_list` of asserts, `test_setup_code`).
"""

import functools
import importlib
import json
import marshal
import math
import operator
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.rewards import sandbox
from lockstep.rewards.sandbox import Limits, Sandbox, fusion

JUDGE = (Path(sandbox.__file__).parent / "run_tests.py").read_text()
TEST_TIMEOUT_S = 5.0
MEMORY_MB = 1024
FILE_MB = 16
NUM_PROCESSES, NUM_OPEN_FILES = 64, 256
NUM_PARTIAL_TESTS = 10
START_TIMEOUT_S = 30.0
"""Start-up time of the judge on a loaded machine."""
MAX_REPLY_BYTES = 2**26
REL_TOLERANCE, ABS_TOLERANCE = 1e-5, 1e-8

IMPORTS = (
    *(
        "bisect",
        "collections",
        "copy",
        "datetime",
        "functools",
        "heapq",
        "itertools",
        "math",
        "operator",
        "os",
        "random",
    ),
    *("re", "string", "sys", "time"),
)
STAR_IMPORTS = ("bisect", "collections", "functools", "heapq", "itertools", "math", "typing")
"""Imports that solutions of programming contests rely on."""

Verdict = dict[str, Any]
"""`{"passed": bool, "error": str | None}`."""


@dataclass(frozen=True)
class Tests:
    """Either `inputs` with `outputs`, or `asserts`."""

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None
    """Function to call with each input; None if the inputs go to standard input."""
    asserts: tuple[str, ...] = ()
    """Test code that calls the program's functions."""
    setup: str = ""
    """Code that runs before each of `asserts`, apart from the program."""
    names: tuple[str, ...] = ()
    """Names in `asserts` that are the program's; empty to find them by the code."""
    prompt: str = ""
    """Code that the program continues."""

    def __len__(self) -> int:
        return len(self.asserts or self.inputs)


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
    it the inputs go to the program's standard input and the outputs are compared with what it prints. Or the rows of
    HumanEval and MBPP as they are published.
    """
    tests = read_tests(ground_truth)
    num_always = min(NUM_PARTIAL_TESTS, len(tests)) if continuous else 0
    verdicts = judge(tests.prompt + extract_program(solution_str), tests, num_always, test_timeout_s, memory_mb)
    passed = sum(verdict["passed"] for verdict in verdicts)
    if passed == len(tests):
        return 1.0, verdicts
    if not continuous:
        return 0.0, verdicts
    if all(verdict["passed"] for verdict in verdicts[:num_always]):
        return passed / len(tests), verdicts  # a later test failed
    return sum(verdict["passed"] for verdict in verdicts[:num_always]) / num_always, verdicts


def compute_scores(
    solution_strs: Sequence[str],
    ground_truths: Sequence[str | dict[str, Any]],
    num_workers: int | None = None,
    **options: Any,
) -> list[tuple[float, list[Verdict]]]:
    """`compute_score` of each response, `num_workers` at a time; None is one per CPU core, or `max_concurrent` of a server."""
    server = fusion.settings()
    num_workers = num_workers or (server.max_concurrent if server else len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_workers, thread_name_prefix="judge") as threads:
        return list(threads.map(lambda pair: compute_score(*pair, **options), zip(solution_strs, ground_truths)))


def extract_program(solution_str: str) -> str:
    """The last ```python block, else the text before any fence."""
    return solution_str.split("```python")[-1].split("```")[0]


def read_tests(ground_truth: str | dict[str, Any]) -> Tests:
    """Parse the tests and check that there is one output per input."""
    tests = ground_truth if isinstance(ground_truth, dict) else json.loads(ground_truth)
    if not isinstance(tests, dict):
        raise ValueError(f"ground_truth of a program must be a dict, not {type(tests).__name__}")
    if "test" in tests and "entry_point" in tests:
        prompt = str(tests.get("prompt") or "")
        name = str(tests["entry_point"])
        return Tests([], [], asserts=(f"{tests['test']}\ncheck({name})",), setup=prompt, names=(name,), prompt=prompt)
    if "test_list" in tests:
        asserts = tuple(map(str, tests["test_list"]))
        if not asserts:
            raise ValueError("ground_truth of a program has an empty test_list")
        return Tests([], [], asserts=asserts, setup=str(tests.get("test_setup_code") or ""))
    if "inputs" not in tests or "outputs" not in tests:
        raise ValueError(
            f"ground_truth of a program has {sorted(tests)}; expected inputs and outputs, test and entry_point, or test_list"
        )
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; expected one output per input"
        )
    return Tests(inputs, outputs, tests.get("fn_name"))


def judge(program: str, tests: Tests, num_always: int, test_timeout_s: float, memory_mb: int) -> list[Verdict]:
    """One verdict per test; after the first `num_always` tests, stop when the program fails to answer."""
    outcomes = run_judge(program, tests, num_always, test_timeout_s, memory_mb)
    if tests.asserts:
        return [verdict(outcome, True, operator.is_) for outcome in outcomes]
    agrees = result_agrees if tests.fn_name else output_agrees
    return [verdict(outcome, wanted, agrees) for outcome, wanted in zip(outcomes, tests.outputs)]


def verdict(outcome: dict[str, Any], wanted: Any, agrees: Callable[[Any, Any], bool]) -> Verdict:
    if "error" in outcome:
        return {"passed": False, "error": str(outcome["error"])}
    if agrees(outcome.get("result"), wanted):
        return {"passed": True, "error": None}
    return {"passed": False, "error": f"got {str(outcome.get('result'))[:100]!r}, expected {str(wanted)[:100]!r}"}


def run_judge(
    program: str, tests: Tests, num_always: int, test_timeout_s: float, memory_mb: int
) -> list[dict[str, Any]]:
    """Outcomes of the tests that ran; the last one is an error if the sandbox was stopped."""
    limit_s = START_TIMEOUT_S + (test_timeout_s + 1.0) * len(tests)
    task = {
        "program": program,
        "prelude": prelude(program),
        "inputs": list(map(_arguments if tests.fn_name else _text, _plain(tests.inputs))),
        "fn_name": tests.fn_name,
        "num_asserts": len(tests.asserts),
        "num_always": num_always,
        "test_timeout_s": test_timeout_s,
    }
    message = _message(task)
    if tests.asserts:
        checks = {"asserts": tests.asserts, "setup": tests.setup, "names": tests.names}
        message += _message({**checks, "prelude": prelude("\n".join((tests.setup, *tests.asserts)))})
    num_asserts = len(tests.asserts)  # each has a process and a channel
    limits = Limits(limit_s, limit_s, memory_mb, FILE_MB, NUM_PROCESSES + 1 + num_asserts, NUM_OPEN_FILES + num_asserts)
    stopped: str | None
    if fusion.settings() is not None:
        reply, stopped = fusion.run_source(JUDGE, message, limit_s)
    else:
        process = Sandbox(limits).start_source(JUDGE)
        try:
            reply = process.communicate(message, limit_s + START_TIMEOUT_S, MAX_REPLY_BYTES)
        except TimeoutError as error:
            return [{"error": str(error)}]
        stopped = process.error
    outcomes = _outcomes(reply, expected=b"p" if tests.asserts else b"j" if tests.fn_name else b"t")
    return [*outcomes, {"error": stopped}] if stopped else outcomes


@functools.lru_cache(maxsize=1024)
def prelude(program: str) -> str:
    """The imports of `IMPORTS` and `STAR_IMPORTS` whose names occur in a program; all if it may look names up itself."""
    words = set(re.findall(r"\w+", program))
    every = not words.isdisjoint(("eval", "exec", "globals", "locals"))
    lines = [f"import {name}" for name in IMPORTS if every or name in words]
    lines += [f"from {name} import *" for name in STAR_IMPORTS if every or not words.isdisjoint(_exported(name))]
    return "\n".join([*lines, "from builtins import pow" if "pow" in words or every else ""])


@functools.cache
def _exported(name: str) -> frozenset[str]:
    module = importlib.import_module(name)
    return frozenset(getattr(module, "__all__", None) or (name for name in vars(module) if not name.startswith("_")))


def _message(content: dict[str, Any]) -> bytes:
    data = marshal.dumps(content, 4)  # a version that every Python of a server reads
    return len(data).to_bytes(8, "big") + data


def _outcomes(reply: bytes, expected: bytes) -> list[dict[str, Any]]:
    """Parse the judge's messages; they may hold anything that a program sent."""
    outcomes: list[dict[str, Any]] = []
    while len(reply) > 8:
        end = 8 + int.from_bytes(reply[:8], "big")
        kind, content, reply = reply[8:9], reply[9:end], reply[end:]
        try:
            text = content.decode()
            if kind == b"e":
                outcomes.append({"error": text})
            elif kind == expected:
                outcomes.append({"result": {b"p": True, b"t": text}[kind] if kind != b"j" else json.loads(text)})
            else:
                outcomes.append({"error": "no outcome"})
        except (ValueError, RecursionError):
            outcomes.append({"error": "the outcome cannot be read"})
    return outcomes


def result_agrees(result: Any, wanted: Any) -> bool:
    """Compare a returned value with the expected one, as JSON; a one-element list matches its element."""
    expected = _plain(_read_json(wanted))
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


def _arguments(given: Any) -> list[Any]:
    return [_read_json(line) for line in given.split("\n")] if isinstance(given, str) else list(given)


def _text(given: Any) -> str:
    return given if isinstance(given, str) else "\n".join(map(str, given))


def _plain(value: Any) -> Any:
    """Convert numpy arrays and numbers, which parquet returns."""
    return json.loads(json.dumps(value, default=_convert))


def _convert(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"ground_truth contains a {type(value).__name__}, which is not JSON")
