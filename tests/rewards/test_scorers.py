"""Scorers on hand-written solutions, and the math grader with threads, runaway input and a killed child."""

import os
import signal
import threading
import time
from types import ModuleType

import pytest

from lockstep.rewards.default import (
    FORMAT_SCORE,
    SCORERS,
    builtin_names,
    check_scorer_options,
    default_compute_score,
    find_scorer,
    named_scorer,
)
from lockstep.rewards.scorers import gsm8k, math, math_dapo, math_grader, prime_math


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so #### 72", "72", "72"),
        ("#### 1,234", "1234", "1,234"),
        ("#### -5 then #### 6", "6", "6"),
        ("The answer is 42", None, "42"),
        ("####  12", None, "12"),
        ("I think. So , it is.", None, None),
        ("it is 3.5", None, "3.5"),
        ("", None, None),
        ("#### 5" + "y" * 300, None, None),
    ],
)
def test_gsm8k_extraction(text: str, strict: str | None, flexible: str | None) -> None:
    assert gsm8k.extract_solution(text, "strict") == strict
    assert gsm8k.extract_solution(text, "flexible") == flexible


def test_gsm8k_scores() -> None:
    assert gsm8k.compute_score("#### 72", "72") == 1.0
    assert gsm8k.compute_score("#### 71", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("It is 72", "72", format_score=0.1) == 0.0
    assert gsm8k.compute_score("It is 72", "72", method="flexible", score=2.0) == 2.0
    with pytest.raises(ValueError, match="must be strict or flexible"):
        gsm8k.compute_score("1", "1", method="loose")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\fbox{ 7 }", "7"),
        (r"$\boxed 5$ is it", "5"),
        (r"\boxed{\frac{1}{2}", None),
        ("no box 3", None),
        (r"\boxed", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert math.last_boxed(text) == answer


@pytest.mark.parametrize(
    ("answer", "ground_truth", "score"),
    [
        (r"\frac{2}{4}", "0.5", 1.0),
        (r"2\sqrt{3}", r"\sqrt{12}", 1.0),
        ("(x+1)^2", "x^2+2x+1", 1.0),
        ("1,000", "1000", 1.0),
        ("042", "42", 1.0),
        ("x = 5", "5", 1.0),
        (r"\text{Evelyn}", "Evelyn", 1.0),
        ("(1, 2)", "(2, 1)", 0.0),
        ("7", "8", 0.0),
        ("", "8", 0.0),
        (r"\frac{1}{", "1", 0.0),
        ("9" * 3000, "9", 0.0),
    ],
)
def test_math_compares_mathematically(answer: str, ground_truth: str, score: float) -> None:
    assert math.compute_score(rf"Hence \boxed{{{answer}}}.", ground_truth) == score


def test_math_without_a_box_scores_zero() -> None:
    assert math.compute_score("The answer is 3.", "3") == 0.0


@pytest.mark.parametrize(
    ("text", "score", "pred"),
    [
        ("So.\nAnswer: 7", 1.0, "7"),
        ("Answer: 4\nAnswer: $7$", 1.0, "7"),
        (r"Answer: \boxed{7}", 1.0, "7"),
        (r"thus \boxed{7}", 1.0, "7"),
        ("Answer: 8", -1.0, "8"),
        ("I do not know", -1.0, "[INVALID]"),
    ],
)
def test_math_dapo(text: str, score: float, pred: str) -> None:
    assert math_dapo.compute_score(text, "7") == {"score": score, "acc": score > 0, "pred": pred}


def test_grader_limits_time_outside_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    scores: list[float] = []
    begun = time.monotonic()
    for answer in (r"9^{9^{9^{9}}}", r"\frac{3}{6}"):
        thread = threading.Thread(target=lambda a=answer: scores.append(math.compute_score(rf"\boxed{{{a}}}", "0.500")))
        thread.start()
        thread.join(timeout=30)
    assert scores == [0.0, 1.0]
    assert time.monotonic() - begun < 25


def test_grader_restarts_a_dead_child() -> None:
    grader = math_grader.MathGrader()
    assert grader.is_equal("0.5", r"\frac12")
    assert grader._process._child is not None
    os.kill(grader._process._child.pid, signal.SIGKILL)
    grader._process._child.wait()
    assert grader.is_equal("0.5", r"\frac12")
    grader.close()


def test_stuck_child_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    grader = math_grader.MathGrader()
    assert grader.is_equal("0.5", r"\frac12")
    monkeypatch.setattr(math_grader, "REPLY_TIMEOUT_S", 0.2)
    assert not grader.is_equal("0.5", r"\sum_{k=1}^{20000} \frac{1}{k^2}")
    assert grader._process._child is None
    monkeypatch.undo()
    assert grader.is_equal("0.5", r"\frac12")
    grader.close()


def test_default_routes_by_data_source() -> None:
    assert default_compute_score("openai/gsm8k", "#### 5", "5") == 1.0
    assert default_compute_score("HuggingFaceH4/MATH-500", r"\boxed{x^2}", "x^2") == 1.0
    assert default_compute_score("aime2025", r"\boxed{7}", "7") == {"score": 1.0, "acc": True, "pred": "7"}
    assert find_scorer("aime24") is find_scorer("math_dapo") is math_dapo.compute_score
    assert find_scorer("numina_olympiads") is prime_math.compute_score
    assert default_compute_score("numina_cn_k12", "The answer is 3.", "3") == 1.0
    assert default_compute_score("searchR1_nq", "<answer>The Paris</answer>", {"target": ["paris"]}) == 1.0
    assert default_compute_score("cais/mmlu_high_school", "Answer: B", "B") == {"score": 1.0, "acc": True, "pred": "B"}
    wanted = "<think>a</think>\n<response>b</response>"
    assert default_compute_score("rlla", wanted, wanted, None)["score"] == 1.0  # type: ignore[index]
    tests = {"inputs": ["1", "2"], "outputs": ["1", "9"]}
    assert default_compute_score("taco", "print(input())", tests) == 0.5


@pytest.mark.parametrize(
    ("scorer", "names"),
    [
        (gsm8k, ["openai/gsm8k", "OpenAI/GSM8K", "gsm8k"]),
        (math, ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "huggingfaceh4/math-500"]),
        (math_dapo, ["BytedTsinghua-SIA/DAPO-Math-17k", "bytedtsinghua-sia/dapo-math-17k", "math_dapo", "MATH"]),
        (math_dapo, ["open-r1/DAPO-Math-17k-Processed", "AIME2024", "aime25", "math-ai/amc23"]),
        (math_dapo, ["Maxwell-Jia/AIME_2024", "HuggingFaceH4/aime_2024", "yentinglin/aime_2025"]),
        (prime_math, ["numina_olympiads", "Numina_CN_K12"]),
    ],
)
def test_hub_names_find_their_scorer_in_any_case(scorer: ModuleType, names: list[str]) -> None:
    for name in names:
        assert find_scorer(name) is scorer.compute_score, name


def test_code_sources_share_a_scorer() -> None:
    names = ("codecontests", "Apps", "codeparrot/apps", "CodeForces", "TACO", "deepmind/code_contests", "MBPP")
    assert {find_scorer(name) for name in names} == {find_scorer("apps")}


def test_a_name_in_the_exact_case_comes_first() -> None:
    try:
        SCORERS.register("Tests/Case")(float.__add__)
        SCORERS.register("tests/case")(float.__mul__)
        assert find_scorer("Tests/Case") is float.__add__ and find_scorer("tests/case") is float.__mul__
    finally:
        for name in ("Tests/Case", "tests/case"):
            SCORERS._entries.pop(name)


def test_wrong_number_in_the_right_form() -> None:
    wrong = ("openai/gsm8k", "#### 71", "72")
    assert default_compute_score(*wrong) == 0.0
    assert default_compute_score(*wrong, in_training=True) == FORMAT_SCORE == 0.1
    assert default_compute_score(*wrong, in_training=True, format_score=0.0) == 0.0
    assert default_compute_score("openai/gsm8k", "It is 72", "72", in_training=True) == 0.0
    assert default_compute_score("openai/gsm8k", "#### 72", "72", in_training=True) == 1.0
    assert default_compute_score("multiple_choice", "Answer: C", "B", in_training=True)["score"] == 0.0  # type: ignore[index]


def test_scorer_option_names_another_scorer() -> None:
    loose = r"\boxed{2\sqrt{3}}", r"\sqrt{12}"
    assert default_compute_score("lighteval/MATH", *loose) == 1.0
    assert default_compute_score("lighteval/MATH", *loose, scorer="math_reward") == 0.0
    by_source = {"lighteval/*": "math_reward"}
    assert default_compute_score("lighteval/MATH", *loose, scorer=by_source) == 0.0
    assert default_compute_score("HuggingFaceH4/MATH-500", *loose, scorer=by_source) == 1.0
    assert default_compute_score("anything", "abc", "abc", scorer="operator:eq") is True
    check_scorer_options({"scorer": "multiple_choice"})
    with pytest.raises(
        ValueError, match=r"reward_kwargs\.scorer=math_rewrd: no such scorer. Did you mean 'math_reward'"
    ):
        check_scorer_options({"scorer": "math_rewrd"})


def test_every_builtin_name_scores() -> None:
    for name in builtin_names():
        assert callable(named_scorer(name)), name
    assert {"gsm8k", "math_reward", "math_verify", "prime_math", "prime_code"} <= set(builtin_names())


def test_options_reach_the_scorer_that_accepts_them() -> None:
    options = {"method": "flexible", "format_score": 0.1}
    check_scorer_options(options)
    assert default_compute_score("openai/gsm8k", "It is 5", "5", None, **options) == 1.0
    assert default_compute_score("openai/gsm8k", "It is 6", "5", None, **options) == 0.1
    assert default_compute_score("lighteval/MATH", r"\boxed{5}", "5", None, **options) == 1.0
    with pytest.raises(ValueError, match=r"reward_kwargs\.metod: no built-in scorer accepts it. Did you mean 'method'"):
        check_scorer_options({"metod": "flexible"})


def test_unknown_data_source_error_names_the_fix() -> None:
    with pytest.raises(ValueError, match=r"'openai/gsm8'\. Did you mean 'openai/gsm8k'.*custom_reward_function\.path"):
        default_compute_score("openai/gsm8", "#### 5", "5")


def test_registered_scorer_is_used() -> None:
    @SCORERS.register("tests/length-*")
    def length(response: str, truth: str, extra_info: dict[str, float] | None = None) -> tuple[float, str]:
        return len(response) + (extra_info or {}).get("bonus", 0.0), "further elements are left out"

    try:
        assert default_compute_score("tests/length-a", "four", "") == 4.0
        assert default_compute_score("tests/length-b", "four", "", {"bonus": 0.5}) == 4.5
    finally:
        SCORERS._entries.pop("tests/length-*")
