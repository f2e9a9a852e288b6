"""Hostile answers against every mathematics scorer: none becomes code, none is right, and the grader stays healthy."""

import ast
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sympy

from lockstep.rewards import scorers
from lockstep.rewards.default import named_scorer
from lockstep.rewards.sandbox import isolation
from lockstep.rewards.scorers import math_grader
from lockstep.rewards.scorers.math_grader import MathGrader
from lockstep.rewards.scorers.math_grader_child import nameless_lambdify

CANARY = f"{tempfile.gettempdir()}/ls{os.getpid()}"
"""No file; an answer that runs creates it."""
MATH_SCORERS = ("geo3k", "gsm8k", "math", "math_dapo", "math_reward", "math_verify", "prime_math")
GOLD = "31415/7"


def spelled(text: str) -> str:
    return "+".join(f"chr({ord(letter)})" for letter in text)


RUN = f"__import__('os').system('touch {CANARY}')"
INJECTIONS = (
    f"getattr(globals(),{spelled('get')})({spelled('eval')})({spelled(RUN)})",
    f"getattr(globals(),{spelled('get')})({spelled('exec')})({spelled(f'open({CANARY!r},chr(119))')})",
    f"open({spelled(CANARY)},chr(119))",
    f"max(open({spelled(CANARY)},chr(119)),1)",
    f"sum(map(exec,({spelled(RUN)},)))",
    f"getattr(getattr(sympy,{spelled('os')}),{spelled('system')})({spelled('touch ' + CANARY)})",
    f"setattr(E,{spelled('x')},1)",
    f"compile({spelled(RUN)},chr(97),{spelled('eval')})",
    RUN,
    f'eval("{RUN}")',
    f"N({RUN!r})",
    f"sympify({RUN!r})",
    f"S({RUN!r})",
    f"Function({RUN!r})(1)",
    f"Symbol({RUN!r})",
    f"lambdify(x,{RUN!r})(1)",
    f"(lambda:{RUN})()",
    f"[x for x in [{RUN}]]",
    "().__class__.__bases__[0].__subclasses__()",
    f"x.subs(x,{RUN!r})",
    f"1 if {RUN} else 0",
    f"breakpoint() or {RUN}",
    "exit(0)",
    "quit()",
    f"\\text{{{RUN}}}",
    f"\\operatorname{{exec}}({spelled(RUN)})",
    f"\\sum_{{k=1}}^{{\\infty}}\\frac{{1}}{{k+\\variable{{abc}}}}+\\variable{{{RUN}}}",
    "\\sum_{k=1}^{\\infty}\\frac{1}{k+\\variable{abc}}",
    "\\sum_{k=1}^{\\infty}\\frac{1}{2^k}",
    f"\\sum_{{k=1}}^{{\\infty}}\\frac{{1}}{{2^k(k+f({spelled('a')}))}}",
    f"\\input{{|touch {CANARY}}}",
    f"\\immediate\\write18{{touch {CANARY}}}",
)
BOMBS = (
    *("9**9**9", "9^9^9", "9^{9^{9^{9}}}", "2**(10**9/7)", "99999!", "((9!)!)!", "10^{10^{10}}!", "x^{999999999}"),
    *(
        r"\binom{1000000000}{500000000}",
        "e^{e^{e^{e^{9}}}}",
        r"\sqrt{" * 300 + "2" + "}" * 300,
        "(" * 1000 + "1" + ")" * 1000,
    ),
    *("[" * 1000, "{" * 1000 + "}" * 1000, "-" * 1000 + "1", "9" * 100_000, "1e999999999", "1/" * 1000 + "3"),
    *("x" * 1_000_000, "1," * 500_000, " " * 100_000 + "1", r"\frac" * 20_000, r"\text{" * 20_000 + "}" * 20_000),
)
ODD_TEXTS = (
    *(
        "٣١٤",
        "３１",
        "𝟑𝟏",
        "31416∕7",
        "х+1",
        "1\x00",
        "\x00",
        "\ud800",
        "31415\ud800/7",
        "\u202e7/51413",
        "nan",
        "inf",
        "-inf",
    ),
    *("∞", "", " ", "\n", "\\", "}{", "%s%n", "{0.__class__}", "$(reboot)", "; rm -rf ~", "1)+(31414", "' OR '1'='1"),
)
HOSTILE = (*INJECTIONS, *BOMBS, *ODD_TEXTS)


def is_right(scorer: str, answer: str) -> bool:
    marker = {"gsm8k": f"#### {answer}", "math_dapo": f"Answer: {answer}"}.get(scorer, f"so \\boxed{{{answer}}}")
    result = named_scorer(scorer)(marker, GOLD)
    if isinstance(result, dict):
        return bool(result["acc"])
    return (result[0] if isinstance(result, tuple) else result) > 0


@pytest.fixture(autouse=True)
def no_canary_left() -> Iterator[None]:
    yield
    Path(CANARY).unlink(missing_ok=True)


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_grader, "STEP_TIMEOUT_S", 1)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("scorer", MATH_SCORERS)
def test_hostile_answers_are_wrong_and_harmless(scorer: str) -> None:
    assert len(HOSTILE) >= 50
    begun = time.monotonic()
    right = [answer for answer in HOSTILE if is_right(scorer, answer)]
    assert right == []
    assert not Path(CANARY).exists()
    assert time.monotonic() - begun < 90
    assert is_healthy(scorer)


def is_healthy(scorer: str) -> bool:
    """Whether the right answer still counts; gsm8k knows numbers only."""
    return named_scorer(scorer)("#### 72", "72") == 1.0 if scorer == "gsm8k" else is_right(scorer, GOLD)


AUDIT = """
import json, sys
from lockstep.rewards.scorers import math_grader_child as child
child.close_generated_code()
events = []

def record(event, arguments):
    if event == "compile" and str(arguments[1]).startswith("<"):
        events.append(str(arguments[0]))
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "socket.connect"):
        events.append(event)
    elif event == "open" and arguments[1] and set("wax+") & set(arguments[1]):
        events.append(str(arguments[0]))

sys.addaudithook(record)
for answer in json.load(sys.stdin):
    for task in child.TASKS:
        text = rf"\\boxed{{{answer}}}" if task == "found" else answer
        child.reply_to({"task": task, "gold": "2/7", "answer": text, "timeout_s": 1})
print(json.dumps(events))
"""


def test_no_text_of_an_answer_is_compiled() -> None:
    """The parser alone, without the sandbox: nothing is opened or started, and generated code has none of its names."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", AUDIT],
        input=json.dumps([answer for answer in INJECTIONS if len(answer) < 300 or answer is INJECTIONS[0]]),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(scorers.__file__).parents[3]), "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # sympy compiles templates for polynomials, and formulas whose names were replaced
    own = ("b'def monomial_", "b'def _lambdifygenerated(Dummy_", "b'from ", "b'import ")
    assert [event for event in json.loads(done.stdout) if not event.startswith(own)] == []
    assert not Path(CANARY).exists()


def test_generated_code_holds_no_names_of_an_answer() -> None:
    k, evil = sympy.symbols("k"), sympy.Symbol(RUN)
    for expression in (
        k + evil,
        sympy.Function("exec")(k),
        sympy.Sum(evil, (evil, 1, k)),
        RUN,
        sympy.MatrixSymbol(RUN, 1, 1),
    ):
        with pytest.raises(NotImplementedError):
            nameless_lambdify(sympy.lambdify, k, expression)
    square = nameless_lambdify(sympy.lambdify, evil, evil**2 + 1)
    assert square(3) == 10
    assert not Path(CANARY).exists()


EXECUTES = {
    "eval",
    "exec",
    "compile",
    "literal_eval",
    "parse_expr",
    "sympify",
    "S",
    "__import__",
    "loads",
    "load",
    "system",
}


def test_no_scorer_evaluates_text() -> None:
    """prime_code is for running programs; `json.loads` is the only `loads`."""
    calls = []
    for path in Path(scorers.__file__).parent.glob("*.py"):
        if path.stem in ("prime_code", "code_judge"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name.rpartition(".")[2] in EXECUTES and name not in ("re.compile", "json.loads"):
                    calls.append(f"{path.name}:{node.lineno}: {name}")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                if names & {"pickle", "marshal", "shelve", "dill", "parse_expr", "sympify"}:
                    calls.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert calls == []


LONG_TEXTS = {
    "spaces": "answer" + " " * 100_000,
    "markers": "answer is " * 10_000,
    "option marks": "Answer:" + " (*_$" * 20_000,
    "open texts": "answer \\text{" + " (" * 50_000,
    "open tags": "<answer>" * 12_500,
    "thoughts and boxes": "<think>" + "</think>\\boxed{" * 7_000,
    "open boxes": "\\boxed{" * 14_000,
    "box and spaces": "\\boxed" + " " * 100_000,
    "braces": "{" * 50_000 + "}" * 50_000,
    "dollars": "$" * 100_000,
    "digits": "1" * 100_000,
    "separators": "1,111" * 20_000,
    "roots": "\\sqrt[" * 16_000,
    "units": "degree " * 14_000,
    "lead-ins": "is be are = : get " * 6_000,
    "calls": "<think>a</think>\n<tool_call>\n" + "[" * 100_000 + "\n</tool_call>",
    "open calls": "<think>" + "</think>\n<tool_call>\n" * 4_000,
}
CALL = '<think>a</think>\n<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>'


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_patterns_are_linear_in_the_text(text: str) -> None:
    """100 KB in every scorer that does not leave the search to math-verify, which has a time limit."""
    assert math_grader.GRADER.is_equal("0.5", r"\frac12")  # its start is not measured
    truths = {"multiple_choice": "A", "search_r1_like_qa_em": {"target": "7"}, "rlla": CALL}
    for scorer in ("geo3k", "gsm8k", "math", "math_dapo", "math_reward", "prime_math", *truths):
        begun = time.monotonic()
        row = ("rlla",) if scorer == "rlla" else ()
        named_scorer(scorer)(*row, text, truths.get(scorer, "7"))
        assert time.monotonic() - begun < 10, scorer


@pytest.fixture
def grader() -> Iterator[MathGrader]:
    grader = MathGrader()
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b'{"value": [true, true]}\n', "unexpected reply"),
        (b'{"value": [1]}\n', "unexpected reply"),
        (b'{"value": true}\n', "unexpected reply"),
        (b'{"value": null}\n', "unexpected reply"),
        (b'{"value": [true]}\n{"value": [true]}\n', "unexpected reply"),
        (b"true\n", "unexpected reply"),
        (b"[" * 9000 + b"\n", "unexpected reply"),
        (b"x" * 20_000, "unexpected reply"),
        (b"\x80\x04\x95.\n", "unexpected reply"),
        (b'{"error": "boom"}\n', "boom"),
        (b'{"value": [true]}', "no reply within"),
        (b"", "no reply within"),
    ],
)
def test_only_verdicts_are_read_from_the_child(
    grader: MathGrader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reply: bytes, problem: str
) -> None:
    code = f"import sys, time; sys.stdin.readline(); sys.stdout.buffer.write({reply!r}); sys.stdout.flush(); time.sleep(60)"
    child = math_grader._sandbox().start_source(code)
    monkeypatch.setattr(math_grader, "_start", lambda: child)
    monkeypatch.setattr(math_grader, "REPLY_TIMEOUT_S", 1.0)
    with caplog.at_level(logging.WARNING):
        assert not grader.is_equal("1", "2")
    assert problem in caplog.text and "counts as wrong" in caplog.text


def test_an_answer_that_kills_the_child_is_wrong(grader: MathGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(math_grader, "_start", lambda: math_grader._sandbox().start_source("raise SystemExit(3)"))
        assert not grader.is_equal("0.5", r"\frac12")
    assert grader.is_equal("0.5", r"\frac12")


@pytest.mark.parametrize(
    "before", ["", "import os, time; os.close(1); time.sleep(0.2)"], ids=["at once", "closes its output first"]
)
def test_a_child_that_does_not_start_is_an_error(
    grader: MathGrader, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    monkeypatch.setattr(math_grader, "BOOTSTRAP", f"{before}\nimport no_such_module")
    with pytest.raises(RuntimeError, match=r"the math grader failed to start: .*no_such_module"):
        grader.is_equal("0.5", r"\frac12")


def test_the_child_has_no_environment_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_SECRET", "secret")
    code = f"import os; print(dict(os.environ), os.path.exists({scorers.__file__!r}), os.path.exists({__file__!r}))"
    output = math_grader._sandbox().start_source(code).communicate(b"", 30, 10_000).decode()
    assert "secret" not in output
    assert "PATH" in output
    if isolation() != "none":
        assert output.endswith("False False\n")


def test_the_grader_runs_without_isolation(
    grader: MathGrader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LOCKSTEP_SANDBOX", raising=False)
    monkeypatch.setattr(math_grader, "isolation", lambda: "none")
    math_grader._sandbox.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert grader.is_equal("0.5", r"\frac12") and not grader.is_equal("0.5", r"\frac13")
        assert caplog.text.count("No sandbox works on this machine") == 1
    finally:
        math_grader._sandbox.cache_clear()
