"""The demo's task: sums of two two-digit numbers, with problems held out for validation.

all 8100 problems ─► train (warm-up and reinforcement learning) | validation (seen by neither)
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "sums"
NUM_VALIDATION = 512


@dataclass(frozen=True)
class Problem:
    """a + b, both from 10 to 99."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}"

    @property
    def right_answer(self) -> int:
        return self.a + self.b

    @property
    def careless_answer(self) -> int:
        """The sum without carries: 47+85 gives 022. Correct if nothing is carried."""
        return (self.a // 10 + self.b // 10) % 10 * 10 + (self.a + self.b) % 10


def answer_text(number: int) -> str:
    """The answer in the expected format: an equals sign and three digits."""
    return f"={number:03d}"


def parse_question(text: str) -> Problem:
    a, b = text.split("+")
    return Problem(int(a), int(b))


def split_problems(seed: int, num_validation: int = NUM_VALIDATION) -> tuple[list[Problem], list[Problem]]:
    """All problems, shuffled by `seed`: (train, validation).

    a+b and b+a go to the same split, so that training does not reveal validation answers.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    order = random.Random(seed)
    order.shuffle(pairs)
    train: list[Problem] = []
    validation: list[Problem] = []
    for a, b in pairs:
        side = validation if len(validation) < num_validation else train
        side += [Problem(a, b)] if a == b else [Problem(a, b), Problem(b, a)]
    order.shuffle(train)
    order.shuffle(validation)
    return train, validation


def write_rows(path: Path, problems: Sequence[Any], split: str, source: str = DATA_SOURCE, **columns: str) -> None:
    """Write problems (`question`, `right_answer`) as rows for `data.train_files` and `data.val_files`.

    columns: more of them, the same in all rows.
    """
    rows: list[dict[str, Any]] = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.right_answer)},
            "extra_info": {"split": split, "index": index},
            **columns,
        }
        for index, problem in enumerate(problems)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
