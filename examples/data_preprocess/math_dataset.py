r"""Convert MATH (Hendrycks) and datasets with the same fields to training rows in parquet.

    python examples/data_preprocess/math_dataset.py --input train.jsonl --output data/math/train.parquet --split train

An example has `problem` and either `answer` or a worked `solution` whose last `\boxed{...}` is the answer; other fields go
to `extra_info`. Examples without an answer are skipped and listed. For MATH-500 add
`--data-source HuggingFaceH4/MATH-500 --split test`.
"""

import logging
from typing import Any

from rows import BOXED, make_row, parse_arguments, read_examples, run, write_rows


def boxed_answer(solution: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\boxed x`, `\fbox{...}`), with matched braces."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        return None
    rest = solution[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.startswith("{"):
        return rest.split("$")[0].strip() or None
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position]
    return None


def answer_of(example: dict[str, Any]) -> str | None:
    answer = example.get("answer")
    return (boxed_answer(example.get("solution") or "") if answer is None else str(answer)) or None


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(
        "Convert MATH to training rows in parquet.",
        argv,
        split="train",
        data_source="DigitalLearningGmbH/MATH-lighteval",
    )
    rows, left_out = [], []
    for number, example in enumerate(read_examples(arguments.input, "problem", split=arguments.split)):
        answer = answer_of(example)
        if answer is None:
            left_out.append(str(number))
            continue
        kept = {name: value for name, value in example.items() if name not in ("problem", "answer")}
        extra = {"split": arguments.split, "index": number} | kept
        rows.append(make_row(arguments.data_source, f"{example['problem']}\n{BOXED}", "math", answer, extra))
    if left_out:
        logging.warning("skipped %d examples without an answer: %s", len(left_out), ", ".join(left_out))
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
