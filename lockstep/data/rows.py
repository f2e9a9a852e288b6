"""Training rows given as Python objects: brought to the schema of training files and written as one.

    list of dicts | datasets.Dataset | pandas.DataFrame ──► to_schema, row by row ──► a jsonl file for `RLHFDataset`

A simple row is `{"prompt": text or messages, "answer": ..., any further column}`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.utils.files import atomic_writer

ANSWER_COLUMNS = ("ground_truth", "answer", "solution")
"""Columns of a simple row that hold its ground truth; the first one that a row has."""
SOURCE = "python"
"""`data_source` of simple rows that have none."""


def is_file_reference(data: Any) -> bool:
    """Whether `data` names files: a path, or a list of paths."""
    paths = data if isinstance(data, list | tuple) else [data]
    return bool(paths) and all(isinstance(path, str | Path) for path in paths)


def write_rows(data: Any, path: Path, prompt_key: str = "prompt", source_key: str = "data_source") -> list[str]:
    """Write the rows of `data` in the schema of training files; returns the columns that a reward function can read."""
    columns: dict[str, None] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path) as file:
        number = -1
        for number, row in enumerate(_rows(data)):
            full = to_schema(row, number, prompt_key, source_key)
            columns |= dict.fromkeys([*full.get("extra_info", {}), *full])
            try:
                file.write(
                    json.dumps(full, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass") + b"\n"
                )
            except TypeError as error:
                raise ValueError(f"data, row {number}: {error}; use text, numbers, lists and dicts") from error
        if number < 0:
            raise ValueError("data has no rows")
    return list(columns)


def to_schema(row: Mapping[str, Any], index: int, prompt_key: str, source_key: str) -> dict[str, Any]:
    """The row with `data_source`, messages, `reward_model` and `extra_info`; a row with `reward_model` is unchanged.

    Text is the message of a user. `extra_info` gets every other column, and the prompt as it was given.
    """
    if "reward_model" in row:
        return dict(row)
    if row.get(prompt_key) is None:
        raise ValueError(
            f"data, row {index} has no {prompt_key!r} (columns: {', '.join(row)}); data.prompt_key names it"
        )
    prompt = row[prompt_key]
    answer = next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)
    extra = {name: value for name, value in row.items() if name not in (prompt_key, source_key, "extra_info")}
    return {
        source_key: row.get(source_key) or SOURCE,
        prompt_key: [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt),
        "reward_model": {"style": "model" if answer is None else "rule", "ground_truth": answer},
        "extra_info": {"index": index, "prompt": prompt} | extra | (row.get("extra_info") or {}),
    }


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
    raise TypeError(f"a value of type {type(value).__name__} cannot be written to a file")
