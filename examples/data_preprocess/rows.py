"""Shared by the scripts in this folder: read published examples, write training rows."""

import argparse
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def parse_arguments(description: str, argv: list[str] | None, **options: str) -> argparse.Namespace:
    """Parse `--input`, `--output` and one option per keyword, with its default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--input", type=Path, required=True, help="the published file: one JSON object per line, or a list"
    )
    parser.add_argument("--output", type=Path, required=True, help="parquet file to write")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=f"default: {default}")
    return parser.parse_args(argv)


def read_examples(path: Path, *fields: str) -> list[dict[str, Any]]:
    """The examples of a file; a missing field is an error that names it."""
    if not path.is_file():
        raise SystemExit(f"--input {path}: no such file")
    text = path.read_text(encoding="utf-8")
    examples = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(s) for s in text.split("\n") if s.strip()]
    )
    for number, example in enumerate(examples):
        for field in fields:
            if field not in example:
                raise SystemExit(f"{path}, example {number} has no {field!r} (fields: {', '.join(example)})")
    return examples


def make_row(
    data_source: str, prompt: str, ability: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """One training row."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def write_rows(rows: Iterable[dict[str, Any]], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows))
    pq.write_table(table, output)
    logging.info("wrote %d rows to %s", table.num_rows, output)


def run(main: Any) -> None:
    """Configure logging, then run `main`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
