"""Convert APPS (`question`, `input_output`, `starter_code`) to rows for the code scorer in parquet.

    python examples/data_preprocess/apps.py --input apps --output data/apps/train.parquet --split train

The dataset is codeparrot/apps on the hub. The ground truth is its `input_output`: JSON `{"inputs", "outputs"}`, with `fn_name` if
the tests call a function; otherwise they use standard input and output. Problems without usable tests are skipped and listed.
"""

import json
import logging
from typing import Any

from rows import make_row, parse_arguments, read_examples, run, write_rows

STANDARD_INPUT = "Write a Python program that reads from standard input and prints the answer to standard output."
FUNCTION = "Complete this code. The tests call `{}`."
BLOCK = "Give the whole program in one ```python block."


def tests_of(example: dict[str, Any]) -> dict[str, Any] | None:
    """The tests; None if there are none, or their JSON cannot be read (some have integers of thousands of digits)."""
    try:
        tests = json.loads(example["input_output"] or "{}")
    except ValueError:
        return None
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    return tests if inputs and outputs and len(inputs) == len(outputs) else None


def prompt_of(example: dict[str, Any], function: str | None) -> str:
    request = FUNCTION.format(function) if function else STANDARD_INPUT
    starter = (example.get("starter_code") or "").strip()
    code = f"\n\n```python\n{starter}\n```" if starter else ""
    return f"{example['question'].strip()}\n\n{request} {BLOCK}{code}"


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments("Convert APPS to rows in parquet.", argv, split="train", data_source="apps")
    rows, left_out = [], []
    for number, example in enumerate(read_examples(arguments.input, "question", "input_output", split=arguments.split)):
        name = str(example.get("problem_id", example.get("id", number)))
        tests = tests_of(example)
        if tests is None:
            left_out.append(name)
            continue
        extra = {"split": arguments.split, "index": number, "problem_id": name}
        extra["difficulty"] = example.get("difficulty")
        prompt = prompt_of(example, tests.get("fn_name"))
        rows.append(make_row(arguments.data_source, prompt, "code", json.dumps(tests), extra))
    if left_out:
        logging.warning("skipped %d problems without usable tests: %s", len(left_out), ", ".join(left_out))
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
