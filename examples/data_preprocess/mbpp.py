"""Convert MBPP (`text`, `code`, `test_list`) to rows for the code scorer in parquet.

    python examples/data_preprocess/mbpp.py --input mbpp.jsonl --output data/mbpp.parquet

The ground truth is JSON `{"fn_name", "inputs", "outputs"}`; the prompt includes the first assert, since the text does not
name the function. Tasks whose asserts are not plain comparisons of a call with a value are skipped and listed.
"""

import ast
import json
import logging
from typing import Any

from asserts import test_cases
from rows import make_row, parse_arguments, read_examples, run, write_rows

INSTRUCTION = "Give the whole Python function in one ```python block. It must pass tests such as:"


def ground_truth(example: dict[str, Any]) -> str | None:
    """The asserts as test cases of the code scorer, for the function that the first one calls."""
    if example.get("test_setup_code"):
        return None
    called = [node.func for node in ast.walk(ast.parse(example["test_list"][0])) if isinstance(node, ast.Call)]
    defined = {node.name for node in ast.walk(ast.parse(example["code"])) if isinstance(node, ast.FunctionDef)}
    name = next((node.id for node in called if isinstance(node, ast.Name) and node.id in defined), None)
    cases = name and test_cases("\n".join(example["test_list"]), name)
    return json.dumps({"fn_name": name, **cases}) if cases else None


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments("Convert MBPP to rows in parquet.", argv, split="train", data_source="mbpp")
    rows, left_out = [], []
    for number, example in enumerate(
        read_examples(arguments.input, "text", "code", "test_list", split=arguments.split)
    ):
        truth = ground_truth(example)
        if truth is None:
            left_out.append(str(example.get("task_id", number)))
            continue
        prompt = f"{example['text'].strip()}\n{INSTRUCTION}\n\n```python\n{example['test_list'][0]}\n```"
        extra = {"split": arguments.split, "index": number, "task_id": str(example.get("task_id", number))}
        rows.append(make_row(arguments.data_source, prompt, "code", truth, extra))
    if left_out:
        logging.warning(
            "skipped %d tasks whose asserts are not plain comparisons: %s", len(left_out), ", ".join(left_out)
        )
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
