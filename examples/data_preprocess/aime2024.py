r"""Convert AIME and AMC problems (`problem`, `answer`) to validation rows in parquet.

    python examples/data_preprocess/aime2024.py --input aime24.jsonl --output data/aime24.parquet

The answer is a number: `27.0` and `027` are written as `27`. AMC 2023: `--data-source math_dapo`.
"""

from rows import make_row, parse_arguments, read_examples, run, write_rows

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def whole_number(answer: object, number: int) -> str:
    try:
        value = float(str(answer))
    except ValueError:
        raise SystemExit(f"example {number}: the answer {answer!r} is not a number") from None
    return str(int(value)) if value == int(value) else str(value)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments("Convert AIME problems to rows in parquet.", argv, split="test", data_source="aime24")
    rows = []
    for number, example in enumerate(read_examples(arguments.input, "problem", "answer")):
        prompt = f"{example['problem']}\n{INSTRUCTION}"
        truth = whole_number(example["answer"], number)
        rows.append(make_row(arguments.data_source, prompt, "math", truth, {"split": arguments.split, "index": number}))
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
