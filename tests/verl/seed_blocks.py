"""The Python blocks of documents: fenced, or assignments in running text."""

import ast
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.environ.get("LOCKSTEP_SEEDS", Path(__file__).parents[3] / "shared" / "seeds"))
_STATEMENT = re.compile(r"[^\x00-\x7f]*\s*([a-z_]+ = \S.*|\{)$")
"""A line of running text that may begin an assignment or a dict, perhaps after words in another script."""
MAX_LINES = 20
"""Lines of a statement in running text."""


@dataclass(frozen=True)
class PythonBlock:
    """file: number of the document; heading: the digits and ASCII words of the nearest one above."""

    file: str
    heading: str
    code: str

    @property
    def first_line(self) -> str:
        """The first line of code, without comment and characters outside ASCII."""
        lines = [line.split("#")[0].rstrip() for line in self.code.splitlines()]
        return _ascii(next((line for line in lines if line.strip()), self.code.splitlines()[0]))

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.heading, self.first_line


def python_blocks(path: Path) -> Iterator[PythonBlock]:
    file, heading = path.name[:3], ""
    fence: tuple[str, list[str]] | None = None  # language and lines
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines):
        opens = re.search(r"```(\w*)$", line.rstrip())
        if opens is not None and (fence is None or opens[1]):
            fence = (opens[1], [])
        elif opens is not None and fence is not None:
            if fence[0] == "python":
                yield PythonBlock(file, heading, "\n".join(fence[1]))
            fence = None
        elif fence is not None:
            fence[1].append(line)
        elif (found := re.match(r"#+ (.*)", line)) is not None:
            heading = _ascii(found[1])
        elif code := _statement(line, lines[number + 1 :]):
            yield PythonBlock(file, heading, code)


def all_blocks() -> list[PythonBlock]:
    return [block for path in sorted(FOLDER.glob("*.txt")) for block in python_blocks(path)]


def _statement(line: str, below: list[str]) -> str | None:
    """The statement that begins in the line; None if it is no Python."""
    start = _STATEMENT.match(line)
    for count in range(MAX_LINES) if start is not None else ():
        with suppress(SyntaxError):
            ast.parse(code := "\n".join([start[1], *below[:count]]))
            return code
    return None


def _ascii(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]+", " ", text).strip()
