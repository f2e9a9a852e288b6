"""GSM8K as published (jsonl with `question` and `answer`) to training rows in parquet.

    python examples/data_preprocess/gsm8k.py --input train.jsonl --output data/gsm8k/train.parquet --split train

The ground truth is the number after `####` in the published answer; the question gets an instruction to end likewise.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def make_row(example: dict[str, str], index: int, split: str) -> dict[str, Any]:
    """One published example as a training row."""
    question, answer = example["question"], example["answer"]
    _, marker, number = answer.rpartition("#### ")
    if not marker:
        raise ValueError(f"example {index}: the answer has no '#### <number>': {answer!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert GSM8K's jsonl to training rows in parquet.")
    parser.add_argument("--input", type=Path, required=True, help="train.jsonl or test.jsonl as published")
    parser.add_argument("--output", type=Path, required=True, help="parquet file to write")
    parser.add_argument("--split", required=True, help="name of the split, kept in extra_info")
    arguments = parser.parse_args(argv)
    lines = arguments.input.read_text(encoding="utf-8").splitlines()
    rows = [make_row(json.loads(line), index, arguments.split) for index, line in enumerate(lines) if line.strip()]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), arguments.output)
    logging.info("wrote %d rows to %s", len(rows), arguments.output)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
