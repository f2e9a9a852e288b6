"""Convert HumanEval (`prompt`, `entry_point`, `test`) to rows for the code scorer in parquet.

    python examples/data_preprocess/humaneval.py --input HumanEval.jsonl --output data/humaneval.parquet

The ground truth is JSON `{"fn_name", "inputs", "outputs"}`. Tasks whose checks are not plain comparisons of a call with a
value (loops, tolerances, random inputs) cannot be converted; they are skipped and listed.
"""

import ast
import json
import logging
from typing import Any

from asserts import test_cases
from rows import make_row, parse_arguments, read_examples, run, write_rows

INSTRUCTION = "Complete the following Python function. Give the whole function in one ```python block."


def ground_truth(example: dict[str, Any]) -> str | None:
    """The checks as test cases of the code scorer."""
    check = next(
        node for node in ast.parse(example["test"]).body if isinstance(node, ast.FunctionDef) and node.name == "check"
    )
    cases = test_cases(ast.unparse(check.body), "candidate")
    return None if cases is None else json.dumps({"fn_name": example["entry_point"], **cases})


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(
        "Convert HumanEval to rows in parquet.", argv, split="test", data_source="openai/openai_humaneval"
    )
    rows, left_out = [], []
    for number, example in enumerate(
        read_examples(arguments.input, "task_id", "prompt", "entry_point", "test", split=arguments.split)
    ):
        truth = ground_truth(example)
        if truth is None:
            left_out.append(example["task_id"])
            continue
        prompt = f"{INSTRUCTION}\n\n```python\n{example['prompt'].rstrip()}\n```"
        extra = {"split": arguments.split, "index": number, "task_id": example["task_id"], "test": example["test"]}
        rows.append(make_row(arguments.data_source, prompt, "code", truth, extra))
    if left_out:
        logging.warning(
            "skipped %d tasks whose checks are not plain comparisons: %s", len(left_out), ", ".join(left_out)
        )
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
