"""Text search in dumps: the raw bytes of a line first, and only lines that may match are parsed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.observability.rollout_files import Row
from lockstep.observability.rollout_table import as_text, lines_of, parse_row, text_in

MAX_TEXT = 500
AROUND = 80
"""Characters of an excerpt before and after the text."""


@dataclass(frozen=True)
class Hit:
    """A row that has the text. column: prompt, answer, "tool call" or "ROLE message"; excerpt: the text and what is around it."""

    row: Row
    column: str
    excerpt: str


class TextSearch:
    """Rows whose prompt, answer or messages have a text, upper and lower case alike."""

    def __init__(self, text: str) -> None:
        if not text.strip() or len(text) > MAX_TEXT:
            raise ValueError(f"text: must be 1 to {MAX_TEXT} characters")
        self._pattern = re.compile(re.escape(text), re.IGNORECASE)
        plain = re.findall(r"[ !#-\[\]-\x7f]+", text)  # other characters may be written as they are or as JSON escapes
        self._needle = max(plain, key=len, default="").lower().encode()

    def lines(self, path: Path, number: int = 0, offset: int = 0) -> Iterator[tuple[int, int, Hit | None]]:
        """(number, offset of its end, hit or None) of each line of the file from line `number` on, which is at the offset."""
        with open(path, "rb") as file:
            file.seek(offset)
            for place, _, end, line in lines_of(file, number):
                yield place, end, self._hit(line) if self._needle in line.lower() else None

    def matching(self, path: Path) -> set[int]:
        """The lines that match."""
        return {line for line, _, hit in self.lines(path) if hit is not None}

    def _hit(self, line: bytes) -> Hit | None:
        row = parse_row(line)
        if row is None:
            return None
        for column, text in _texts(row):
            if match := self._pattern.search(text):
                begin = max(0, match.start() - AROUND)
                excerpt = (
                    f"{'…' * (begin > 0)}{text[begin : match.end() + AROUND]}{'…' * (match.end() + AROUND < len(text))}"
                )
                return Hit(row, column, excerpt)
        return None


def _texts(row: Row) -> Iterator[tuple[str, str]]:
    """(column, text) of what is searched. Images are not."""
    yield "prompt", text_in(row, "input")
    yield "answer", text_in(row, "output")
    for message in _dicts(row.get("messages")):
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            yield f"{text_in(message, 'role')[:40]} message", as_text(text)
        for call in _dicts(message.get("tool_calls")):
            for function in _dicts([call.get("function")]):
                yield "tool call", f"{text_in(function, 'name')} {text_in(function, 'arguments')}"


def _dicts(values: Any) -> list[Row]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
