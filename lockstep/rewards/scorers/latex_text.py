r"""LaTeX math to plain text that sympy can parse: `\frac{a}{b}` is `a/b`, `\sqrt{3}` is `sqrt(3)`, `\pi` is `pi`."""

import unicodedata

SYMBOLS = {
    "pi": "pi",
    "infty": "inf",
    "cup": "U",
    "cap": "∩",
    "cdot": "*",
    "times": "*",
    "div": "/",
    "pm": "±",
    "le": "≤",
    "leq": "≤",
    "ge": "≥",
    "geq": "≥",
    "ne": "≠",
    "neq": "≠",
    "lt": "<",
    "gt": ">",
    "in": "∈",
    "to": "→",
    "circ": "∘",
    "ldots": "…",
    "dots": "…",
    "cdots": "…",
    "quad": " ",
    "qquad": " ",
    "begin": "[ ",
    "end": " ]",
}
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd lcm det".split()  # noqa: SIM905
)
SPACES = frozenset(",;: \n~")
ENVIRONMENTS = frozenset(("begin", "end"))


def latex_to_text(latex: str) -> str:
    """The text of a formula; commands with no textual meaning, such as `\\left`, are dropped."""
    return _Reader(latex).text_until_close()


class _Reader:
    """Reads a formula from left to right; an unclosed brace ends with the text."""

    def __init__(self, latex: str) -> None:
        self.latex = latex
        self.at = 0

    def text_until_close(self) -> str:
        parts: list[str] = []
        while self.at < len(self.latex) and self.latex[self.at] != "}":
            parts.append(self._next())
        self.at += 1
        return "".join(parts)

    def _next(self) -> str:
        letter = self.latex[self.at]
        self.at += 1
        if letter == "{":
            return self.text_until_close()
        if letter == "\\":
            return self._command(self._name())
        return {"$": "", "&": " ", "~": " "}.get(letter, letter)

    def _name(self) -> str:
        """A command name: letters, or a single other character."""
        start = self.at
        while self.at < len(self.latex) and self.latex[self.at].isascii() and self.latex[self.at].isalpha():
            self.at += 1
        if self.at == start:
            self.at += 1
        return self.latex[start : self.at]

    def _command(self, name: str) -> str:
        if not name:  # the text ends with a backslash
            return ""
        if name in ("frac", "dfrac", "tfrac"):
            return f"{self._argument()}/{self._argument()}"
        if name == "sqrt":
            degree = self._option()
            return f"({self._argument()})^(1/{degree})" if degree else f"sqrt({self._argument()})"
        if name in ENVIRONMENTS:
            self._argument()
        if name in SYMBOLS:
            return SYMBOLS[name]
        if name in FUNCTIONS:
            return name
        if name == "\\":
            return "; "
        if len(name) == 1:
            return " " if name in SPACES else "" if name in "!()[]" else name
        return _greek(name)

    def _argument(self) -> str:
        while self.at < len(self.latex) and self.latex[self.at] == " ":
            self.at += 1
        return self._next() if self.at < len(self.latex) else ""

    def _option(self) -> str:
        end = self.latex.find("]", self.at)
        if end < 0 or not self.latex.startswith("[", self.at):
            return ""
        option, self.at = self.latex[self.at + 1 : end], end + 1
        return option


def _greek(name: str) -> str:
    case = "CAPITAL" if name[0].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {case} LETTER {name.upper()}")
    except KeyError:
        return ""
