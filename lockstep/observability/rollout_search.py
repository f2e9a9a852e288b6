"""Text search in dumps: the raw bytes of a line first, and only lines that may match are parsed."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.observability.rollout_files import Row
from lockstep.observability.rollout_table import lines_of, parse_row, text_in

MAX_TEXT = 500
AROUND = 80
"""Characters of an excerpt before and after the text."""
COLUMNS = {"input": "prompt", "output": "answer"}


@dataclass(frozen=True)
class Hit:
    """A row that has the text. column: prompt or answer; excerpt: the text and what is around it."""

    row: Row
    column: str
    excerpt: str


class TextSearch:
    """Rows whose prompt or answer has a text, upper and lower case alike."""

    def __init__(self, text: str) -> None:
        if not text.strip() or len(text) > MAX_TEXT:
            raise ValueError(f"text: must be 1 to {MAX_TEXT} characters")
        self._pattern = re.compile(re.escape(text), re.IGNORECASE)
        ascii_parts = re.findall(r"[\0-\x7f]+", text)  # other characters may be written as they are or as JSON escapes
        self._needle = json.dumps(max(ascii_parts, key=len, default=""))[1:-1].lower().encode()

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
        for column, name in COLUMNS.items():
            text = text_in(row, column)
            if match := self._pattern.search(text):
                begin = max(0, match.start() - AROUND)
                excerpt = (
                    f"{'…' * (begin > 0)}{text[begin : match.end() + AROUND]}{'…' * (match.end() + AROUND < len(text))}"
                )
                return Hit(row, name, excerpt)
        return None
