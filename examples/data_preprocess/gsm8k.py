"""Convert GSM8K (`question`, `answer`) to training rows in parquet.

    python examples/data_preprocess/gsm8k.py --input train.jsonl --output data/gsm8k/train.parquet --split train

The ground truth is the number after `####` in the published answer; an instruction asks for the same format.
"""

from typing import Any

from rows import make_row, parse_arguments, read_examples, run, write_rows

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def row_of(example: dict[str, str], index: int, split: str, data_source: str) -> dict[str, Any]:
    """One published example as a training row."""
    question, answer = example["question"], example["answer"]
    _, marker, number = answer.rpartition("#### ")
    if not marker:
        raise SystemExit(f"example {index}: the answer has no '#### <number>': {answer!r}")
    extra = {"split": split, "index": index, "answer": answer, "question": question}
    return make_row(data_source, f"{question} {INSTRUCTION}", "math", number.strip().replace(",", ""), extra)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(
        "Convert GSM8K to training rows in parquet.", argv, split="train", data_source="openai/gsm8k"
    )
    examples = read_examples(arguments.input, "question", "answer", split=arguments.split)
    rows = [row_of(example, i, arguments.split, arguments.data_source) for i, example in enumerate(examples)]
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
