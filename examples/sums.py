"""Sums of two numbers: rows to train on, and their reward. Used by grpo_smollm2_lora.sh.

python examples/sums.py FOLDER     writes train.parquet and test.parquet
"""

import random
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd

NUMBER = re.compile(r"\d+")
NUM_HELD_OUT = 40


def rows() -> list[dict[str, Any]]:
    """All sums of two numbers from 1 to 20, shuffled."""
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(0).shuffle(pairs)
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for a, b in pairs
    ]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 for the sum alone, 0.5 if it is the last number of a sentence, 0.1 for another number alone."""
    numbers = NUMBER.findall(solution_str)
    right = bool(numbers) and numbers[-1] == ground_truth
    alone = solution_str.strip() == ground_truth if right else NUMBER.fullmatch(solution_str.strip()) is not None
    score = (1.0 if alone else 0.5) if right else 0.1 * alone
    return {"score": score, "acc": float(right)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = rows()
    pd.DataFrame(found[NUM_HELD_OUT:]).to_parquet(folder / "train.parquet")
    pd.DataFrame(found[:NUM_HELD_OUT]).to_parquet(folder / "test.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
