"""One row of a dump (`{step}.jsonl`), and the rows beside it."""

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.observability.dashboard.request import NotFound
from lockstep.utils.untrusted import JSON_ERRORS


@dataclass(frozen=True)
class DumpRow:
    """values: the JSON of the line. group: the rows with the same uid, its own included. num_rows: of the dump."""

    values: dict[str, Any]
    group: list[int]
    num_rows: int


def read_row(dump: Path, row: int) -> DumpRow:
    """The row with this number, from 0. NotFound without one; ValueError if it is damaged."""
    with open(dump, "rb") as lines:
        line = next(islice(lines, row, None), None)
    if line is None:
        raise NotFound(f"{dump.name} has no row {row}")
    try:
        values = json.loads(line)
    except JSON_ERRORS:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{dump.name}, row {row}: not a row of a dump")
    state = dump.stat()
    group, num_rows = _alike(dump, state.st_mtime_ns, state.st_size, values.get("uid"))
    return DumpRow(values, list(group) if row in group else [row], num_rows)


@lru_cache(maxsize=64)
def _alike(dump: Path, mtime_ns: int, size: int, uid: Any) -> tuple[tuple[int, ...], int]:
    """The rows with this uid, and the number of rows. mtime_ns, size: of the file, which may be replaced."""
    wanted = f'"uid": {json.dumps(uid, ensure_ascii=False)}'.encode("utf-8", "backslashreplace")
    found, number = [], -1
    with open(dump, "rb") as lines:
        for number, line in enumerate(lines):
            if isinstance(uid, str) and wanted in line:
                found.append(number)
    return tuple(found), number + 1
