"""Agreement with published correctness on real model solutions; needs the files in LOCKSTEP_DATA/solutions."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.rewards.scorers import gsm8k, math

FOLDER = Path(os.environ.get("LOCKSTEP_DATA", "/nonexistent")) / "solutions"
MIN_AGREEMENT = 0.99

CASES: dict[str, Callable[[dict[str, Any]], float]] = {
    # these solutions end with `A: 26`, which the strict method does not parse
    "gsm8k_model_solutions": lambda row: gsm8k.compute_score(row["solution"], row["ground_truth"], method="flexible"),
    "math_qwen_solutions": lambda row: math.compute_score(row["solution"], row["ground_truth"]),
}

EXPLAINED = {
    "gsm8k-test-419-175b_finetuning": "3,000 as written, against 3000",
    "gsm8k-test-819-175b_finetuning": "6,250 as written, against 6250",
    "math100-72-7": "10000 is 10{,}000; published as wrong",
}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs LOCKSTEP_DATA, a folder with solutions/")
@pytest.mark.parametrize("name", CASES)
def test_agreement_with_published_correctness(name: str) -> None:
    rows = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    misses = [row["id"] for row in rows if (CASES[name](row) == 1.0) != row["correct"]]
    print(f"{name}: {len(rows) - len(misses)} of {len(rows)} agree; misses: {misses}")
    assert len(misses) <= (1 - MIN_AGREEMENT) * len(rows)
    assert set(misses) <= set(EXPLAINED)
