"""Programs: when a test passes, and that a program harms neither the judge nor other programs."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.rewards.scorers.prime_code import (
    compute_score,
    compute_scores,
    extract_program,
    output_agrees,
    prelude,
    read_tests,
    result_agrees,
)

DATA = Path(os.environ.get("LOCKSTEP_DATA", "/nonexistent")) / "code"

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


def errors(program: str, tests: Any = SUM, **options: Any) -> list[str | None]:
    return [verdict["error"] for verdict in compute_score(program, tests, **options)[1]]


def test_programs_that_print() -> None:
    assert (
        compute_score("Here:\n```python\nprint(sum(map(int, input().split())))\n```\nDone.", json.dumps(SUM))[0] == 1.0
    )
    assert compute_score("import sys\nsys.stdout.buffer.write(b'3')\nsys.exit()", SUM, continuous=True)[0] == 0.5
    assert compute_score("print(sum(map(int, input().split())))\nexit()", SUM)[0] == 1.0
    assert compute_score("print(3)", SUM)[0] == 0.0
    assert errors("def broken(:") == ["SyntaxError: invalid syntax"]


def test_programs_that_return() -> None:
    tests = {"inputs": ["1\n[2, 3]", [4, [5]]], "outputs": ["[1, 2, 3]", np.array([4, 5])], "fn_name": "f"}
    assert compute_score("def f(a: int, b: List[int]):\n    print(a)\n    return (a, *b)", tests)[0] == 1.0
    assert (
        compute_score("class Solution:\n    def f(self, a, b):\n        return [1, 2, 3]", tests, continuous=True)[0]
        == 0.5
    )
    assert errors("def g(): pass", tests) == ["KeyError: 'f'"]


def test_fraction_of_tests() -> None:
    """The fraction of the first ten; if only a later test fails, of all tests."""
    tests = {"inputs": [str(n) for n in range(20)], "outputs": [str(n) for n in range(20)]}
    assert compute_score("n = int(input())\nprint(n if n % 2 else -1)", tests, continuous=True)[0] == 0.5
    assert compute_score("n = int(input())\nassert n < 15\nprint(n)", tests, continuous=True)[0] == 0.75


def test_hanging_programs_are_stopped() -> None:
    begun = time.monotonic()
    assert errors("while True: pass", test_timeout_s=0.5) == ["took longer than 0.5 s"]
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os._exit(0)", "ended before it answered"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended before it answered"),
        ("x = [0] * 10**10", "MemoryError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_programs_that_fail(program: str, error: str) -> None:
    assert errors(program) == [error]


def test_processes_of_a_program_do_not_outlive_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = f"import os, time\nif os.fork() == 0:\n    time.sleep(1)\n    open({str(mark)!r}, 'w')\nprint(3)"
    compute_score(program, SUM, continuous=True)
    time.sleep(1.5)
    assert not mark.exists()


def test_program_cannot_see_the_expected_output() -> None:
    program = "import gc\nprint('SECRET' '-7' in str([o for o in gc.get_objects() if isinstance(o, (dict, list))]))"
    assert compute_score(program, {"inputs": [""], "outputs": ["SECRET-7"]})[1][0]["error"].startswith("got 'False")


@pytest.mark.parametrize(
    ("output", "wanted", "agrees"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.3333333", "0.333333", True),
        ("1000001", "1000000", False),
        ("1\n2", "1 2", False),
        ("2\n1", "1\n2", False),
        ("1\n2", ["1", "2"], True),
        ("a.b", "a.c", False),
    ],
)
def test_printed_output(output: str, wanted: Any, agrees: bool) -> None:
    assert output_agrees(output, wanted) is agrees


@pytest.mark.parametrize(
    ("result", "wanted", "agrees"),
    [
        ([1, 2], "[1, 2]", True),
        (3, [3], True),
        (0.30000000000000004, 0.3, True),
        ([1, [2.0]], [1, [2]], True),
        ("abc", "abc", True),
        ("abc", '"abc"', True),
        (None, "[1]", False),
        ("1", 1.0, False),
    ],
)
def test_returned_values(result: Any, wanted: Any, agrees: bool) -> None:
    assert result_agrees(result, wanted) is agrees


def test_blocks_and_ground_truths() -> None:
    assert extract_program("```python\na\n```\n```python\nb\n```") == "\nb\n"
    assert extract_program("print(1)") == "print(1)"
    with pytest.raises(ValueError, match="expected inputs and outputs, test and entry_point, or test_list"):
        read_tests({"inputs": []})
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
        read_tests({"inputs": ["", ""], "outputs": [""]})
    with pytest.raises(ValueError, match="empty test_list"):
        read_tests({"test_list": []})


def test_humaneval_form() -> None:
    """A whole function or the rest of the prompt; the test's helpers are those of the prompt, not of the program."""
    tests = {
        "prompt": 'def double(x):\n    return 2 * x\n\ndef halve(x):\n    "Inverse of double."\n',
        "entry_point": "halve",
        "test": "def check(candidate):\n    for n in range(5):\n        assert candidate(double(n)) == n\n",
    }
    assert compute_score("    return x // 2", tests)[0] == 1.0
    assert compute_score("```python\ndef halve(x):\n    return x // 2\n```", json.dumps(tests))[0] == 1.0
    assert errors("def halve(x): return x\ndef double(x): return x", tests) == ["AssertionError"]
    assert errors("def halve(x): raise ValueError('no')", tests) == ["ValueError: no"]
    assert errors("def halve(x): exit(0)", tests) == ["RuntimeError: SystemExit: 0"]


def test_mbpp_form() -> None:
    """One test per assert; objects of the program's classes and plain values of all kinds pass between the processes."""
    tests = {
        "test_setup_code": "import math",
        "test_list": [
            "assert f(Point(1, 2)) == (1, {2: {3}})",
            "assert math.isclose(f(Point(0, 10**5000 - 1))[0], 0) and f(Point(b'a', None)) == (b'a', {None: {3}})",
            "assert f(Point(1j, 'int')) == (1j, {'int': {3}}) and f(Point(int, 1)) == (int, {1: {3}})",
            "assert f(Point(2, 2)) == [2, {2: {3}}]",
        ],
    }
    program = """
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
def f(p: Optional[Point]): return p.x, {p.y: {3}}
"""
    assert compute_score(program, tests, continuous=True)[0] == 0.75
    assert compute_score("def sum(a, b): return a - b", {"test_list": ["assert sum(5, 3) == 2"]})[0] == 1.0


def test_many_asserts() -> None:
    tests = {"test_list": [f"assert f({n}) == {n}" for n in range(300)]}
    assert compute_score("def f(n): return n", tests)[0] == 1.0


def test_imports_that_programs_rely_on() -> None:
    assert prelude("print(1)").split() == []
    assert prelude("x: List[int] = [pow(2, 3, 5)]").splitlines() == [
        "from math import *",
        "from typing import *",
        "from builtins import pow",
    ]
    program = "print(sqrt(heapq.nsmallest(1, [9])[0]), pow(2, 3, 5), eval('gcd(4, 6)'))"
    assert compute_score(program, {"inputs": [""], "outputs": ["3.0 3 2"]})[0] == 1.0


def test_many_programs_keep_their_order() -> None:
    programs = [f"a, b = map(int, input().split())\nprint(a + b + {n % 2})" for n in range(6)]
    assert [score for score, _ in compute_scores(programs, [SUM] * 6, num_workers=3)] == [1.0, 0.0] * 3


MUTATION = """
_original = {name}
def _mutated(value):
    if isinstance(value, bool) or value is None: return not value
    if isinstance(value, (int, float)): return value + 1
    if isinstance(value, (list, tuple)): return [*value, 1]
    return str(value) + "x"
def {name}(*args):
    return _mutated(_original(*args))
"""


@pytest.mark.skipif(not DATA.is_dir(), reason="needs LOCKSTEP_DATA, a folder with code/")
def test_humaneval() -> None:
    rows = [json.loads(line) for line in (DATA / "humaneval.jsonl").read_text().splitlines()]
    solutions = [row["canonical_solution"] for row in rows]
    mutants = [text + MUTATION.format(name=row["entry_point"]) for text, row in zip(solutions, rows)]
    results = compute_scores(solutions + mutants, rows * 2, test_timeout_s=20.0)
    wrong = [row["task_id"] for row, (score, _) in zip(rows, results) if score != 1.0]
    missed = [row["task_id"] for row, (score, _) in zip(rows, results[len(rows) :]) if score != 0.0]
    assert (len(rows), wrong, missed) == (164, [], [])
