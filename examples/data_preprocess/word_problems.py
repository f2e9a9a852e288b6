"""Merge files of easy word problems into one training and one held-out file.

    python examples/data_preprocess/word_problems.py --input easy/*.parquet --output data/easy

Duplicate questions are kept once, and questions that differ only in their numbers stay in the same split. Each question
follows four worked examples that show the format: a sentence, then `####` and the number.
"""

import argparse
import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rows import make_row, run, write_rows

EXAMPLES = [
    (
        "A shelf holds 12 cups. Mia takes 5 of them. How many cups are left on the shelf?",
        "There were 12 cups and 5 were taken, so 12 - 5 = 7 cups are left.\n#### 7",
    ),
    (
        "Each of 6 vases holds 4 flowers. How many flowers are there?",
        "6 vases with 4 flowers each are 6 * 4 = 24 flowers.\n#### 24",
    ),
    (
        "Leo has 8 coins and finds 9 more. How many coins does he have?",
        "He had 8 coins and found 9 more, so he has 8 + 9 = 17 coins.\n#### 17",
    ),
    (
        "30 cards are dealt to 5 players. How many cards does each player get?",
        "30 cards for 5 players are 30 / 5 = 6 cards each.\n#### 6",
    ),
]


def messages(question: str) -> list[dict[str, str]]:
    """The worked examples as conversation turns, then the question."""
    turns = [turn for asked, answered in EXAMPLES for turn in (("user", asked), ("assistant", answered))]
    return [{"role": role, "content": text} for role, text in [*turns, ("user", question)]]


def row_of(source: dict[str, Any]) -> dict[str, Any]:
    """A row of the input with the few-shot prompt."""
    extra = source["extra_info"]
    row = make_row(source["data_source"], "", "math", source["reward_model"]["ground_truth"], extra)
    return row | {"prompt": messages(extra["question"])}


def form_of(question: str) -> str:
    """The question without numbers, spaces and punctuation."""
    return re.sub(r"\d+", "0", re.sub(r"[^a-z0-9]", "", question.lower()))


def split(
    rows: list[dict[str, Any]], num_held_out: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, held-out rows) in random order; whole forms are held out until there are `num_held_out` rows."""
    by_form: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        question = row["extra_info"]["question"]
        exact = re.sub(r"[^a-z0-9]", "", question.lower())
        by_form.setdefault(form_of(question), {}).setdefault(exact, row)
    groups = [list(same_form.values()) for same_form in by_form.values()]
    random.Random(seed).shuffle(groups)
    held_out: list[dict[str, Any]] = []
    while groups and len(held_out) < num_held_out:
        held_out += groups.pop()
    return [row for group in groups for row in group], held_out[:num_held_out]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Merge files of word problems and hold some out.")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="parquet files of training rows")
    parser.add_argument("--output", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--held-out", type=int, default=400, help="rows in test.parquet; default: 400")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and the split; default: 0")
    arguments = parser.parse_args(argv)
    rows = [row for path in arguments.input for row in pq.read_table(path).to_pylist()]
    train, test = split(rows, arguments.held_out, arguments.seed)
    if not train:
        raise SystemExit(
            f"--held-out {arguments.held_out} leaves nothing to train on: the files have {len(test)} questions"
        )
    write_rows(map(row_of, train), arguments.output / "train.parquet")
    write_rows(map(row_of, test), arguments.output / "test.parquet")


if __name__ == "__main__":
    run(main)
