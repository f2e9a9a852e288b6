"""Convert GSM8K (`question`, `answer`) to pairs of a prompt and a response, for supervised training.

    python examples/data_preprocess/gsm8k_pairs.py --input train.jsonl --output data/gsm8k/pairs.parquet

The prompt is the same as in gsm8k.py, so that RL can continue from it. The calculator annotations (`<<48/2=24>>`) are
removed: without a calculator they repeat the equation before them, and cost a third more tokens.
"""

import re

from gsm8k import INSTRUCTION
from rows import parse_arguments, read_examples, run, write_rows

NOTE = re.compile(r"<<.*?>>")


def pair_of(example: dict[str, str]) -> dict[str, str]:
    return {"prompt": f"{example['question']} {INSTRUCTION}", "response": NOTE.sub("", example["answer"])}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments("Convert GSM8K to pairs in parquet.", argv)
    write_rows(map(pair_of, read_examples(arguments.input, "question", "answer")), arguments.output)


if __name__ == "__main__":
    run(main)
