"""The math scorers that follow verl's rules: equality and extraction."""

import pytest

from lockstep.rewards.scorers import geo3k, math_dapo, math_reward, math_verify, prime_math
from lockstep.rewards.scorers.latex import NoNormalFormError, normal_form
from lockstep.rewards.scorers.latex_text import latex_to_text
from lockstep.rewards.scorers.symbolic import agree_strictly, agree_within_tolerance


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"\dfrac 1 2", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac{1}2", r"\frac{1}2"),
        (r"\frac3", r"\frac3"),
        ("0.5", r"\frac{1}{2}"),
        (".5", r"\frac{1}{2}"),
        ("-3/4", r"\frac{-3}{4}"),
        ("03/4", "03/4"),
        ("a/b", "a/b"),
        (r"\sqrt3 + \sqrt{5}", r"\sqrt{3}+\sqrt{5}"),
        ("x = 5", "5"),
        ("speed = 5", "speed=5"),
        (r"5\text{ cm}", "5"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"90^\circ", "90"),
        (r"\$1,\!000", "1,000"),
        (r"50\%", "50"),
        ("", ""),
    ],
)
def test_normal_form_of_math_answers(text: str, form: str) -> None:
    assert normal_form(text) == form


@pytest.mark.parametrize("text", [r"\frac", r"\frac{1}{2}\frac", r"\sqrt", r"1\text{ m}\text{ s}"])
def test_answers_without_a_normal_form_are_compared_as_text(text: str) -> None:
    with pytest.raises(NoNormalFormError):
        normal_form(text)
    assert math_reward.is_equivalent(text, text)
    assert not math_reward.is_equivalent(text, text + " ")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"$\boxed 5$ then \boxed{6}", "5"),
        (r"\fbox{7}", None),
        (r"\boxed{7", None),
        ("7", None),
    ],
)
def test_math_reward_reads_boxes_like_verl(text: str, answer: str | None) -> None:
    assert math_reward.last_boxed(text) == answer


def test_math_reward_compares_text_only() -> None:
    assert math_reward.compute_score(r"\boxed{1/2}", r"\frac{1}{2}") == 1.0
    assert math_reward.compute_score(r"\boxed{2\sqrt{3}}", r"\sqrt{12}") == 0.0
    assert math_reward.compute_score(r"\boxed{1,000}", "1000") == 0.0


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("x = 10{,}000 dollars", "10000"),
        (r"the answer is $\frac12$.", r"\frac{1}{2}"),
        (r"\text{an even} number", "evennumber"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("1,234", "1234"),
        ("(1, 2)", "(1,2)"),
        (r"\boxed{90^\circ}", "90"),
        ("042", "042"),
    ],
)
def test_normal_form_of_dapo_answers(answer: str, form: str) -> None:
    assert math_dapo.normal_form(answer) == form


def test_math_dapo_strict_box() -> None:
    def strict(text: str, truth: str) -> tuple[bool, str | None]:
        result = math_dapo.compute_score(text, truth, strict_box_verify=True)
        return result["acc"], result["pred"]

    assert strict(r"Answer: 4, \boxed{5}", "5") == (True, "5")
    assert strict(r"\boxed{3,250}", "3250") == (False, "3,250")
    assert strict("Answer: 5", "5") == (False, None)
    assert strict(r"\boxed{5}" + "." * 100, "5") == (False, None)


def test_math_dapo_uses_the_box_without_an_answer_line() -> None:
    assert math_dapo.compute_score(r"so \boxed{12 \frac{3}{5}}", r"12\frac{3}{5}")["acc"] is False
    assert math_dapo.compute_score(r"so \boxed{5}" + "." * 100, "5")["pred"] == "[INVALID]"
    assert math_dapo.compute_score("Answer: 5" + "." * 300, "5")["pred"] == "[INVALID]"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"The answer is \boxed{5} apples.", "5"),
        ("Thus x = 7", "7"),
        ("The answer is 3.", "3."),
        ("It must be 4. I am sure", "4"),
        ("42 is the answer", "42"),
        (r"\boxed{x = \frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{9}", "9"),
        (r"\boxed{7", r"\boxed{7"),
        ("seven", "seven"),
    ],
)
def test_prime_math_extraction(text: str, answer: str) -> None:
    assert prime_math.extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "strict", "lenient"),
    [
        ("1,000", "1000", True, True),
        ("10.0", "10", True, True),
        (r"2\sqrt{3}", r"\sqrt{12}", True, False),
        (r"1\frac{1}{2}", "1.5", True, False),
        ("5 meters", "5", True, False),
        ("3 million", "3000000", False, False),
        (r"\text{Evelyn}", "evelyn", True, False),
        ("2/4", "1/2", False, True),
        ("(2, 1)", "(1, 2)", False, False),
        (r"(\frac{1}{2}, 3)", r"(0.5, 3)", True, False),
        ("0.3333", r"1/3", False, True),
        ("50", "0.5", False, True),
        ("9999", "10{,}000", False, True),
        (r"3.14", r"\pi", False, True),
        (r"7\pi", "22", False, False),
        ("40_9", "40", False, True),
        ("x_1", "1", False, False),
        ("", "1", False, False),
        ("2^3", "8", False, False),
        ("x*(x+1)", "x**2+x", True, True),
        ("six", "seven", False, False),
        ("x**2*y**2", "y**2*x**2", True, True),
        ("4x^3(2x^2+7)", "(8x^5+28x^3)", True, False),
        ("sqrt(3)^2", "3", False, True),
        ("1 + 1/N", "1/N + 1", True, True),
        ("2^1009 + 1 - 1", "2^1009", False, True),
        ("1)+(2", "3", False, False),
        ("True", "1", False, False),
        (r"2\pi/0", "1", False, False),
    ],
)
def test_agreement_of_answers(answer: str, gold: str, strict: bool, lenient: bool) -> None:
    assert (agree_strictly(gold, answer), agree_within_tolerance(gold, answer)) == (strict, lenient)


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\frac{1}{2}", "1/2"),
        (r"\frac12", "1/2"),
        (r"2\sqrt{3}", "2sqrt(3)"),
        (r"\sqrt[3]{8}", "(8)^(1/3)"),
        (r"(-\infty, 2] \cup [3, \infty)", "(-inf, 2] U [3, inf)"),
        (r"\left(3, \frac{\pi}{2}\right)", "(3, pi/2)"),
        (r"\theta \cdot x^{2}", "θ * x^2"),
        (r"\sin x\,dx", "sin x dx"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "[  1   2 ;  3   4  ]"),
        (r"\text{a}\unknown{b}", "ab"),
        ("{open", "open"),
        ("\\", ""),
    ],
)
def test_latex_to_text(latex: str, text: str) -> None:
    assert latex_to_text(latex) == text


def test_scorers_that_use_the_grader() -> None:
    assert prime_math.compute_score(r"Step 2: so \boxed{0.3333}", "1/3") == (True, True, "0.3333")
    assert prime_math.compute_score(r"so \boxed{9999}", "10000") == (True, False, "9999")
    assert prime_math.compute_score("seven", "7") == (False, False, "seven")
    matrix = r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"
    for gold in (matrix, matrix.replace("bmatrix", "pmatrix")):
        assert prime_math.compute_score(rf"so \boxed{{{matrix}}}", gold)[0]
        assert not prime_math.compute_score(rf"so \boxed{{{matrix}}}", gold.replace("4", "5"))[0]
    rows = "\n 1 & 2 \\\\\n 3 & 4"
    in_lines = [
        f"\\begin{{{kind}}}{rows}{end}\\end{{{kind}}}" for kind, end in (("bmatrix", " \n "), ("pmatrix", "\n"))
    ]
    assert prime_math.compute_score(*in_lines)[0]
    assert math_verify.compute_score("no box 3", "3") == 1.0
    assert math_verify.compute_score(r"\boxed{50\%}", "50") == 0.0
    assert geo3k.compute_score(r"<think>a</think> \boxed{1/2}", r"\frac{1}{2}") == pytest.approx(1.0)
    assert geo3k.compute_score(r"\boxed{3}", "3") == pytest.approx(0.9)
    assert geo3k.compute_score(r"<think>a</think>\boxed{4}", "3") == pytest.approx(0.1)
    assert geo3k.compute_score("3", "3", use_boxed=False, format_score=0.2) == pytest.approx(0.8)
    assert geo3k.compute_score("3", "3") == 0.0
