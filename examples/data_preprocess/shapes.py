"""Make training rows with pictures: how many shapes of a colour and a form does a picture show?

    python examples/data_preprocess/shapes.py --num-rows 1000 --seed 1 --output data/shapes/train.parquet

Pictures are PNG files in the column `images`. The answer is scored as GSM8K's: the number after `####`.
"""

import argparse
from itertools import islice
from pathlib import Path

from rows import make_row, run, write_rows

from lockstep.demo.shapes import DATA_SOURCE, questions

INSTRUCTION = 'Write the number after "####".'


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make rows with pictures of coloured shapes.")
    parser.add_argument("--num-rows", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seed", type=int, default=1, help="default: 1; use another one for validation")
    parser.add_argument("--output", type=Path, required=True, help="parquet file to write")
    arguments = parser.parse_args(argv)
    rows = []
    for index, question in enumerate(islice(questions(arguments.seed), arguments.num_rows)):
        prompt = f"<image>{question.text} {INSTRUCTION}"
        row = make_row(DATA_SOURCE, prompt, "counting", str(question.right_answer), {"index": index})
        rows.append(row | {"images": [{"bytes": question.png()}]})
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
