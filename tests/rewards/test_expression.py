"""The parser of answers: what it reads equals sympy's own parser, and everything else is refused."""

import time

import pytest
import sympy
from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr, standard_transformations

from lockstep.rewards.scorers.expression import Dialect, NotAnExpressionError, is_small, parse_expression

# sympy's parser is the reference here, on texts of our own.
SHARED = """1/2 | x*(x+1) | x**2 | 5! | x! | -x! | (x)! | pi/2 | 1.5 | .5 | 5. | 1e3 | -3/4 | 2**-1 | 2*-3 | --3 | +3 | log(8,2)
    sin(pi/6) | sqrt(12) | theta | xi | oo | -oo | 1/0 | E | I | binomial(5,2) | factorial(4) | 1+2*3-4/5 | 2**3**2 | -2**2
    1-2-3 | 1-(2-3) | 2/3/4 | 2/(3/4) | -(2+3) | (1+2)*(3+4) | x**y | x**0.5 | root(8,3) | exp(1) | gcd(4,6) | abs(-3)
    max(1,2) | α+1 | sqrt(2)!"""
PLAIN = "2^3 | 2^3+1 | -3^2 | 2^-1 | word | f(x)+1 | f(1,2)"
POWER = "2^3 | 2^3+1 | -3^2 | 2^-1 | sqrt(2)^2 | x^y | word | f(x)+1"
IMPLICIT = """2x | x^2+2x+1 | 2sqrt(3) | sqrt 3x | ln 2 + 1 | ln^2(2) | ln(2)x | xy | x2 | x2^3 | 2pi | pi(2) | x(x+1) | 1/2x
    (x+1)(x-1) | (2)3 | 2 3 | 3(4) | theta x | mu x | 2e | 2!x | a b | 7 3/4 | xyz | 2θ | θx | e^x | sqrt(2)(3)"""
REFUSED = """2x | x= | x<3 | (1,2) | 1,2 | two words | True | lambda | 007 | x.y | x.is_real | [1] | {1} | "a" | a_b | x; y
    f() | f(x=1) | 3%2 | 7//2 | 3!! | ( | ) | 1+ | *2 | x:y | @x | `x` | \\pi | sin | sqrt() | sqrt(1,2,3) | x^2 | ٣ | 1\x00"""


def texts(table: str) -> list[str]:
    return [text.strip() for line in table.splitlines() for text in line.split("|")]


def reference(text: str, dialect: Dialect) -> sympy.Expr:
    if dialect == "plain":
        return parse_expr(text)
    if dialect == "power":
        return sympy.sympify(text)
    return parse_expr(
        text.replace("^", "**"), transformations=(*standard_transformations, implicit_multiplication_application)
    )


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        *((dialect, text) for dialect in ("plain", "power", "implicit") for text in texts(SHARED)),
        *(("plain", text) for text in texts(PLAIN)),
        *(("power", text) for text in texts(POWER)),
        *(("implicit", text) for text in texts(IMPLICIT)),
    ],
)
def test_equals_the_parser_of_sympy(dialect: Dialect, text: str) -> None:
    assert sympy.srepr(parse_expression(text, dialect)) == sympy.srepr(reference(text, dialect))


@pytest.mark.parametrize(
    "text", ["1/2", "-3/4", "1+2*3-4/5", "2**3**2", "1-(2-3)", "2/(3/4)", "(1+2)*(3+4)", "3-(-2)", "1.50"]
)
def test_unevaluated_tree_equals_that_of_sympy(text: str) -> None:
    assert sympy.srepr(parse_expression(text, evaluate=False)) == sympy.srepr(parse_expr(text, evaluate=False))


@pytest.mark.parametrize("text", texts(REFUSED))
def test_text_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(NotAnExpressionError):
        parse_expression(text)


@pytest.mark.parametrize("dialect", ["plain", "power", "implicit"])
@pytest.mark.parametrize(
    "text",
    [
        *(
            "9**9**9",
            "9**(9**9)",
            "(9**999)**999",
            "2**999999",
            "2**-999999",
            "2**(10**9/7)",
            "1.5**9999999",
            "x**1001",
        ),
        *(
            "99999!",
            "(9**5)!",
            "factorial(99999)",
            "factorial(factorial(50))",
            *("binomial(10**9, 5*10**8)", "binomial(1/2, 10**6)", "binomial(-2, 10**6)"),
            "exp(10**6)",
        ),
        *("1e99999", "1" * 1001, "(" * 41 + "1" + ")" * 41, "2**" * 50 + "2", "x" + "+x" * 500),
    ],
)
def test_large_expressions_are_refused_at_once(text: str, dialect: Dialect) -> None:
    begun = time.monotonic()
    with pytest.raises(NotAnExpressionError):
        parse_expression(text, dialect)
    assert time.monotonic() - begun < 1


def test_size_of_an_unevaluated_tree() -> None:
    def power(base: int, exponent: sympy.Expr | int) -> sympy.Expr:
        return sympy.Pow(base, exponent, evaluate=False)

    assert is_small(power(2, power(2, power(2, 3)))) and is_small(power(10, 10_000))
    assert is_small(sympy.binomial(10**9, 3, evaluate=False)) and is_small(sympy.Matrix([[1, 2]]))
    assert not is_small(sympy.Matrix([[1, power(9, power(9, 9))]]))
    assert not is_small(power(9, power(9, 9))) and not is_small(
        sympy.factorial(100_000, evaluate=False) + sympy.Symbol("x")
    )
