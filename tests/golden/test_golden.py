"""Every golden case, called by verl's names in `lockstep.verl`: the same inputs must give verl's numbers.

Cases that need a real tokenizer only run if SMOLLM2_DIR is set.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# a tokenizer that is not on disk is a failed case at once, not a wait for the network
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import harness  # noqa: E402
import smollm2  # noqa: E402

VECTORS = HERE / "golden_public"
FAMILIES = sorted(path.stem for path in VECTORS.glob("*.json"))
NEED_TOKENIZER = ("rl_dataset", "prompt_tensors", "sft_dataset", "rm_dataset")
CASES = [
    pytest.param(case, id=f"{family}-{case['id']}", marks=[smollm2.needs_smollm2] if family in NEED_TOKENIZER else [])
    for family in FAMILIES
    for case in harness.load(str(VECTORS), family)
]
RESOLVER = harness.Resolver("lockstep.verl", model=str(smollm2.FOLDER))


@pytest.mark.parametrize("case", CASES)
def test_golden(case: dict[str, Any]) -> None:
    try:
        arrays, values = harness.run(RESOLVER, case)
    except harness.Absent:
        raise
    except Exception:
        if "raises" in case:
            return
        raise
    assert "raises" not in case, f"should raise {case['raises']}"
    difference = harness.compare(case, arrays, values)
    assert difference is None, difference


def test_no_family_is_forgotten() -> None:
    assert len(FAMILIES) == 25 and len(CASES) == 1169
