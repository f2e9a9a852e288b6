r"""Answer text to a sympy expression, without `eval`: the grammar below, and sympy's constructors for what it matches.

    expression  sum, or with `plain` also  sum ^ sum: bitwise xor of integers, as Python reads it
    sum         product  (+|-) product ...
    product     unary  (*|/) unary ...; with `implicit` also  power power: `2x(y+1)` is 2*x*(y+1)
    unary       (+|-) unary, or power
    power       postfix, or postfix (**|^) unary
    postfix     atom, or atom !
    atom        number, name, name(expression, ...), (expression); with `implicit` also  sqrt 3, ln^2(x)

The three dialects are those in which sympy's `parse_expr` was called: `plain` is its default, `power` reads `^` as `**`,
`implicit` also multiplies neighbours and splits words (`xy` is x*y). Names come from the tables below or become symbols.
Text outside the grammar, and numbers too large to be an answer (`9**9**9`, `99999!`), raise NotAnExpressionError.
"""

import keyword
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn

import sympy

Dialect = Literal["plain", "power", "implicit"]

MAX_CHARS = 1000
MAX_DEPTH = 40
MAX_BITS = 50_000
"""Bits of a number's numerator or denominator: 15,000 digits."""
MAX_DEGREE = 1000
"""Largest exponent of something with variables, which sympy may expand."""

TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[^\W\d_][^\W_]*)|(?P<op>\*\*|[-+*/^!(),]))"
)
CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo, "zoo": sympy.zoo, "nan": sympy.nan}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(sympy, name)
        for name in (
            *("sqrt", "cbrt", "root", "exp", "log", "ln", "Abs", "sign", "re", "im", "conjugate", "floor", "ceiling"),
            *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"),
            *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "factorial", "binomial"),
            *("gcd", "lcm", "Max", "Min"),
        )
    },
    **{"abs": sympy.Abs, "max": sympy.Max, "min": sympy.Min},
}


class NotAnExpressionError(ValueError):
    """The text is outside the grammar, or too large to evaluate."""


class Token(NamedTuple):
    kind: Literal["number", "name", "op", "end"]
    text: str


def parse_expression(text: str, dialect: Dialect = "plain", *, evaluate: bool = True) -> sympy.Expr:
    """The expression that `text` denotes. `evaluate=False` keeps sums, products and powers as written."""
    if len(text) > MAX_CHARS:
        raise NotAnExpressionError(f"more than {MAX_CHARS} characters")
    try:
        expression = _Parser(text, dialect, evaluate).parse()
    except NotAnExpressionError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError) as error:
        # sympy's constructors: a wrong number of arguments, an integer operation on something else
        raise NotAnExpressionError(str(error)) from error
    if not isinstance(expression, sympy.Expr):
        raise NotAnExpressionError("not a number or formula")
    return expression


def is_small(expression: sympy.Basic | sympy.MatrixBase) -> bool:
    """Whether no number in the tree has more than MAX_BITS bits once evaluated."""
    return num_bits(expression) <= MAX_BITS


def num_bits(expression: Any) -> float:
    """Upper bound on log2 of the numerator and denominator that a tree evaluates to; a variable counts as one bit."""
    if isinstance(expression, sympy.Rational):
        return math.log2(max(abs(expression.p), expression.q, 2))
    if isinstance(expression, sympy.Float):
        _, _, exponent, mantissa_bits = expression._mpf_
        return float(max(abs(exponent + mantissa_bits), 1))
    if isinstance(expression, (sympy.Pow, sympy.exp)):
        base, exponent = expression.as_base_exp()
        return max(1.0, num_bits(base) * _largest(exponent))
    if isinstance(expression, sympy.factorial):
        largest = _largest(expression.args[0])
        return max(1.0, largest * math.log2(largest + 2))
    if isinstance(expression, sympy.binomial):
        top, bottom = expression.args
        if top.is_Integer and not top.is_negative:
            return max(1.0, min(_largest(top), num_bits(top) * _largest(bottom)))
        return max(1.0, (num_bits(top) + num_bits(bottom)) * _largest(bottom))  # a product of `bottom` fractions
    parts = expression.flat() if isinstance(expression, sympy.MatrixBase) else getattr(expression, "args", ())
    bits = [num_bits(part) for part in parts]
    return sum(bits) if isinstance(expression, sympy.Mul) else max(bits, default=1.0) + math.log2(len(bits) + 1)


def _largest(expression: Any) -> float:
    """Upper bound on the absolute value; 1 for a single variable."""
    if isinstance(expression, sympy.Symbol):
        return 1.0
    if isinstance(expression, (sympy.Rational, sympy.Float)) and num_bits(expression) < 1000:
        return abs(float(expression))
    bits = num_bits(expression)
    return 2.0**bits if bits < 1000 else math.inf


class _Parser:
    """Recursive descent over the tokens; `at` is the next one."""

    def __init__(self, text: str, dialect: Dialect, evaluate: bool) -> None:
        self.implicit = dialect == "implicit"
        self.powers = ("**",) if dialect == "plain" else ("**", "^")
        self.evaluate = evaluate
        self.tokens = list(_tokens(text, split_words=self.implicit))
        self.at = 0
        self.depth = 0

    def parse(self) -> sympy.Expr:
        expression = self.expression()
        if self.tokens[self.at].kind != "end":
            self.fail()
        return expression

    def fail(self) -> NoReturn:
        raise NotAnExpressionError(f"unexpected {self.tokens[self.at].text or 'end'!r}")

    def take(self, *operators: str) -> str | None:
        """Consume the next token if it is one of these operators."""
        token = self.tokens[self.at]
        if token.kind != "op" or token.text not in operators:
            return None
        self.at += 1
        return token.text

    def expression(self) -> sympy.Expr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotAnExpressionError(f"more than {MAX_DEPTH} levels")
        left = self.sum()
        while self.take("^"):  # a dialect with `^` as a power has consumed it
            left = _xor(left, self.sum())
        self.depth -= 1
        return left

    def sum(self) -> sympy.Expr:
        left = self.product()
        while operator := self.take("+", "-"):
            right = self.product()
            if operator == "-":
                right = sympy.Mul(-1, right, evaluate=self.evaluate)
            left = self.combine(sympy.Add, left, right)
        return left

    def product(self) -> sympy.Expr:
        left = self.unary()
        while True:
            if operator := self.take("*", "/"):
                right = self.unary()
                left = self.combine(
                    sympy.Mul, left, right if operator == "*" else self.power_of(right, sympy.Integer(-1))
                )
            elif self.implicit and self.starts_atom():
                left = self.combine(sympy.Mul, left, self.power())
            else:
                return left

    def starts_atom(self) -> bool:
        token = self.tokens[self.at]
        return token.kind in ("number", "name") or token == ("op", "(")

    def unary(self) -> sympy.Expr:
        signs = 0
        while operator := self.take("+", "-"):
            signs += operator == "-"
        value = self.power()
        return -value if signs % 2 else value

    def power(self) -> sympy.Expr:
        base = self.postfix()
        return self.power_of(base, self.nested(self.unary)) if self.take(*self.powers) else base

    def postfix(self) -> sympy.Expr:
        value = self.atom()
        return _factorial(value) if self.take("!") else value

    def atom(self) -> sympy.Expr:
        kind, text = token = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return _number(text)
        if kind == "name":
            return self.named(text)
        if token == ("op", "("):
            value = self.expression()
            return value if self.take(")") else self.fail()
        self.at -= 1
        self.fail()

    def named(self, name: str) -> sympy.Expr:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if keyword.iskeyword(name):
            raise NotAnExpressionError(f"unexpected {name!r}")
        if name in FUNCTIONS:
            return self.applied(name)
        if not self.implicit and self.take("("):
            return sympy.Function(name)(*self.arguments())
        return sympy.Symbol(name)

    def applied(self, name: str) -> sympy.Expr:
        """A call; without parentheses the argument is the product that follows: `ln 2x + 1` is ln(2*x) + 1."""
        exponent = self.nested(self.postfix) if self.implicit and self.take(*self.powers) else None
        if self.take("("):
            arguments = self.arguments()
        elif self.implicit and self.starts_atom():
            arguments = [self.nested(self.power)]
            while self.take("*") or self.starts_atom():
                arguments = [self.combine(sympy.Mul, arguments[0], self.nested(self.power))]
        else:
            self.fail()
        value = _apply(name, arguments)
        return value if exponent is None else self.power_of(value, exponent)

    def nested(self, rule: Callable[[], sympy.Expr]) -> sympy.Expr:
        """Apply a rule that may contain itself without parentheses, such as `2**2**2`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotAnExpressionError(f"more than {MAX_DEPTH} levels")
        value = rule()
        self.depth -= 1
        return value

    def arguments(self) -> list[sympy.Expr]:
        arguments = [self.expression()]
        while self.take(","):
            arguments.append(self.expression())
        return arguments if self.take(")") else self.fail()

    def combine(self, operation: type[sympy.Add] | type[sympy.Mul], left: Any, right: Any) -> sympy.Expr:
        """A sum or product; unevaluated ones are flat."""
        if self.evaluate:
            return operation(left, right)
        parts = [part for side in (left, right) for part in (side.args if isinstance(side, operation) else (side,))]
        return operation(*parts, evaluate=False)

    def power_of(self, base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
        _check_size(sympy.Pow(base, exponent, evaluate=False))
        if not base.is_number and _largest(exponent) > MAX_DEGREE:
            raise NotAnExpressionError(f"a power above {MAX_DEGREE}")
        return sympy.Pow(base, exponent, evaluate=self.evaluate)


def _tokens(text: str, split_words: bool) -> Iterator[Token]:
    text = text.strip()
    at = 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise NotAnExpressionError(f"unexpected {text[at]!r}")
        at = match.end()
        name = match["name"]
        if name is None:
            yield Token("op", match["op"]) if match["op"] else Token("number", match["number"])
        elif split_words and name not in CONSTANTS and name not in FUNCTIONS and not _is_greek(name):
            # every letter is a variable, digits in between are numbers
            for part in re.findall(r"[0-9]+|.", name):
                yield Token("number" if part.isascii() and part.isdigit() else "name", part)
        else:
            yield Token("name", name)
    yield Token("end", "")


def _is_greek(name: str) -> bool:
    try:
        return bool(unicodedata.lookup(f"GREEK SMALL LETTER {name}"))
    except KeyError:
        return False


def _number(text: str) -> sympy.Number:
    if text.isdigit():
        if text[0] == "0" and text.strip("0"):
            raise NotAnExpressionError(f"leading zeros: {text!r}")
        return sympy.Integer(int(text))
    _, _, exponent = text.lower().partition("e")
    if len(exponent.lstrip("+-")) > 4:
        raise NotAnExpressionError(f"exponent too large: {text!r}")
    return sympy.Float(text)


def _factorial(value: sympy.Expr) -> sympy.Expr:
    _check_size(sympy.factorial(value, evaluate=False))
    return sympy.factorial(value)


def _apply(name: str, arguments: list[sympy.Expr]) -> sympy.Expr:
    function = FUNCTIONS[name]
    if name in ("factorial", "binomial", "exp"):
        _check_size(function(*arguments, evaluate=False))
    return function(*arguments)


def _xor(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    if not isinstance(left, sympy.Integer) or not isinstance(right, sympy.Integer):
        raise NotAnExpressionError("^ of something that is not an integer")
    return sympy.Integer(int(left) ^ int(right))


def _check_size(expression: sympy.Basic) -> None:
    if not is_small(expression):
        raise NotAnExpressionError(f"a number of more than {MAX_BITS} bits")
