"""Programs: when a test passes, and that a program harms neither the judge nor other programs."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.rewards.scorers.prime_code import (
    JUDGE,
    compute_score,
    extract_program,
    output_agrees,
    read_tests,
    result_agrees,
)

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


def errors(program: str, tests: Any = SUM, **options: Any) -> list[str | None]:
    return [verdict["error"] for verdict in compute_score(program, tests, **options)[1]]


def test_programs_that_print() -> None:
    assert (
        compute_score("Here:\n```python\nprint(sum(map(int, input().split())))\n```\nDone.", json.dumps(SUM))[0] == 1.0
    )
    assert compute_score("import sys\nsys.stdout.buffer.write(b'3')\nsys.exit()", SUM, continuous=True)[0] == 0.5
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
        ("while True: print('x' * 100_000)", "OSError: [Errno 27] File too large"),
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
    with pytest.raises(ValueError, match="must have inputs and outputs"):
        read_tests({"inputs": []})
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
        read_tests({"inputs": ["", ""], "outputs": [""]})


def test_judge_works_without_namespaces(tmp_path: Path) -> None:
    """Without namespaces, only the process group is killed."""
    mark = tmp_path / "mark"
    program = f"import os, time\nif os.fork() == 0:\n    time.sleep(1)\n    open({str(mark)!r}, 'w')\nprint(input())"
    task = {"program": program, "inputs": ["1", "2"], "fn_name": None}
    task |= {"num_always": 2, "test_timeout_s": 5.0, "memory_mb": 512}
    script = (
        f"import importlib.util as u; s = u.spec_from_file_location('judge', {str(JUDGE)!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.enter_namespaces = lambda: False; m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], input=json.dumps(task), cwd=tmp_path, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == [{"result": "1\n"}, {"result": "2\n"}]
    time.sleep(1.5)
    assert not mark.exists()
