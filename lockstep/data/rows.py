"""Rows as users write them, completed to the columns that training reads; and rows of Python objects, written to a file.

{"prompt": text or messages, "answer": ..., any further column}  ──to_schema──►  data_source, prompt, reward_model, extra_info
list of dicts | datasets.Dataset | pandas.DataFrame  ──write_rows──►  a jsonl file for `RLHFDataset`
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL.Image import Image

from lockstep.data.files import FileRow
from lockstep.data.images import ImageError, data_uri, read_image
from lockstep.utils.data_uri import as_data_uri
from lockstep.utils.files import atomic_writer

ANSWER_COLUMNS = ("ground_truth", "answer", "solution")
"""Columns of a simple row that hold its ground truth; the first one that a row has."""
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}
SOURCE_KEY, TRUTH_KEY = "data_source", "reward_model"
SOURCE = "default"
"""`data_source` of rows that have none."""


def is_file_reference(data: Any) -> bool:
    """Whether `data` names files: a path, or a list of paths."""
    paths = data if isinstance(data, list | tuple) else [data]
    return bool(paths) and all(isinstance(path, str | Path) for path in paths)


def write_rows(data: Any, path: Path, prompt_key: str = "prompt", source_key: str = "data_source") -> list[str]:
    """Write the rows of `data` to a jsonl file; returns the columns that a reward function can read."""
    columns: dict[str, None] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path) as file:
        number = -1
        for number, row in enumerate(_rows(data)):
            if row.get(prompt_key) is None:
                raise ValueError(
                    f"data, row {number} has no {prompt_key!r} (columns: {', '.join(row)}); data.prompt_key names it"
                )
            full = to_schema(row, number, prompt_key, source_key)
            columns |= dict.fromkeys([*(full.get("extra_info") or {}), *full])
            try:
                text = json.dumps(dict(row), ensure_ascii=False, default=_plain)
            except TypeError as error:
                raise ValueError(f"data, row {number}: {error}; use text, numbers, lists and dicts") from error
            except ImageError as error:
                raise ImageError(f"data, row {number}: an image {error}") from error
            file.write(text.encode("utf-8", "surrogatepass") + b"\n")
        if number < 0:
            raise ValueError("data has no rows")
    return list(columns)


def to_schema(
    row: Mapping[str, Any], index: int, prompt_key: str, source_key: str, truth_key: str = TRUTH_KEY
) -> dict[str, Any]:
    """The row with a `data_source`, messages as its prompt, `reward_model` and `extra_info`; what it has is kept.

    Text is the message of a user. Without `reward_model`, the ground truth is the first of `ANSWER_COLUMNS` that the row has,
    and `extra_info` gets every other column, and the prompt as it was given. Columns with other names, which the user has set,
    are not made up.
    """
    full = dict(row)
    prompt = row.get(prompt_key)
    if source_key == SOURCE_KEY:
        full[source_key] = row.get(source_key) or SOURCE
    if isinstance(prompt, str):
        full[prompt_key] = [{"role": "user", "content": prompt}]
    if truth_key == TRUTH_KEY and row.get(truth_key) is None:
        answer = next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)
        known = (prompt_key, source_key, truth_key, "extra_info")
        extra = {name: value for name, value in row.items() if name not in known}
        full[truth_key] = {"style": "model" if answer is None else "rule", "ground_truth": answer}
        full["extra_info"] = {"index": index, "prompt": prompt} | extra | (row.get("extra_info") or {})
    return full


def rows_by_source(rows: Iterable[FileRow], source_key: str) -> dict[str, FileRow]:
    """Each data source with its first row that has no ground truth, which its scorer may need, else with its first row."""
    found: dict[str, FileRow] = {}
    for row in rows:
        known = found.setdefault(str(row.columns[source_key]), row)
        if _has_truth(known) and not _has_truth(row):
            found[str(row.columns[source_key])] = row
    return found


def _has_truth(row: FileRow) -> bool:
    return row.columns["reward_model"].get("ground_truth") is not None


def _rows(data: Any) -> Iterator[Mapping[str, Any]]:
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a pandas.DataFrame
        data = data.to_dict("records")
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        raise ValueError(
            f"data must be rows (a list of dicts, a Dataset, a DataFrame) or file names, not {type(data).__name__}"
        )
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise ValueError(f"data, row {number} must be a dict, not {type(row).__name__}")
        yield row


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch
        return value.tolist()
    if isinstance(value, bytes):  # an image
        return as_data_uri(value)
    if isinstance(value, Image):
        return data_uri(read_image(value))
    raise TypeError(f"a value of type {type(value).__name__} cannot be written to a file")


def parse_dialogue(text: str) -> list[dict[str, str]] | None:
    r"""The turns of "\n\nHuman: …\n\nAssistant: …", as in HH-RLHF, as chat messages; None if the text is not such a dialogue.

    The last turn is the assistant's; it is empty if it is still to be written.
    """
    before, *turns = _TURN.split(f"\n\n{text.strip()}")
    if before or "Human" not in turns[::2] or turns[-2] != "Assistant":
        return None
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(turns[::2], turns[1::2])]
