"""Shared by the scripts in this folder: read published examples, write training rows."""

import argparse
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.files import iter_file
from lockstep.utils.dataset_files import local_data_files

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""Instruction of the math datasets."""


def parse_arguments(description: str, argv: list[str] | None, **options: str) -> argparse.Namespace:
    """Parse `--input`, `--output` and one option per keyword, with its default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--input",
        required=True,
        help="the published dataset: a file (parquet, jsonl, json), a folder, or org/name[:config][:split] of the Hub",
    )
    parser.add_argument("--output", type=Path, required=True, help="parquet file to write")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=f"default: {default}")
    return parser.parse_args(argv)


def read_examples(source: str, *fields: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """The examples of `source`, one at a time; a missing field is an error that names it."""
    for path in files_of(source, split):
        logging.info("reading %s", path)
        for number, example in enumerate(_iter_file(path)):
            for field in fields:
                if field not in example:
                    raise SystemExit(f"{path}, example {number} has no {field!r} (fields: {', '.join(example)})")
            yield example


def files_of(source: str, split: str) -> list[Path]:
    """The file, or those of a folder, Hub dataset or URL that belong to `split`."""
    try:
        files = local_data_files(source, split, "--input")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    folder = Path(source).expanduser()
    if folder.is_dir() and len({file.name for file in files}) < len(files):
        configs = ", ".join(sorted({str(file.parent.relative_to(folder)) for file in files}))
        raise SystemExit(f"--input={source}: several configurations ({configs}); pass the folder of one")
    return files


def _iter_file(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from iter_file(path)
    except ValueError as error:
        raise SystemExit(str(error)) from None


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
    if not table.num_rows:
        raise SystemExit(f"there are no examples to write to {output}")
    pq.write_table(table, output)
    logging.info("wrote %d rows to %s", table.num_rows, output)


def run(main: Any) -> None:
    """Configure logging, then run `main`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
