"""Every golden case whose function exists here: the same inputs must give the public system's numbers.

A case whose function, estimator or loss is not in the package is skipped under the missing name.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.advantages import ADVANTAGE_ESTIMATORS
from lockstep.algorithms.losses import POLICY_LOSSES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import adapter  # noqa: E402
import harness  # noqa: E402

VECTORS = HERE / "golden_public"
ELSEWHERE = {
    "dataproto": "run in tests/protocol",
    "reward_code": "needs a fixture file that is not in the repository",
    "reward_default": "dispatches to scorers that are not here",
    "reward_math": "compares answers as strings where the scorers here grade mathematical equality",
    "rl_dataset": "needs a real tokenizer",
    "prompt_tensors": "needs a real tokenizer",
    "sft_dataset": "needs a real tokenizer",
    "rm_dataset": "needs a real tokenizer",
}
FAMILIES = sorted(path.stem for path in VECTORS.glob("*.json") if path.stem not in ELSEWHERE)
CASES = [
    pytest.param(case, id=f"{family}-{case['id']}")
    for family in FAMILIES
    for case in harness.load(str(VECTORS), family)
]
RESOLVER = harness.Resolver("lockstep", json.loads((HERE / "map.json").read_text()), adapter)


def missing_entry(params: dict[str, Any]) -> str | None:
    """The registered name that a case asks for and the package does not have."""
    if "estimator" in params and params["estimator"] not in ADVANTAGE_ESTIMATORS:
        return f"advantage estimator {params['estimator']}"
    if "loss" in params and params["loss"] not in POLICY_LOSSES:
        return f"policy loss {params['loss']}"
    return None


@pytest.mark.parametrize("case", CASES)
def test_golden(case: dict[str, Any]) -> None:
    missing = missing_entry(case["params"])
    if missing:
        pytest.skip(f"absent: {missing}")
    try:
        arrays, values = harness.run(RESOLVER, case)
    except harness.Absent as absent:
        pytest.skip(f"absent: {str(absent).split(':')[0]}")
    except (ValueError, NotImplementedError, AssertionError, KeyError):
        if "raises" in case:
            return
        raise
    assert "raises" not in case, f"should raise {case['raises']}"
    difference = harness.compare(case, arrays, values)
    assert difference is None, difference


def test_no_family_is_forgotten() -> None:
    assert {"advantages", "policy_loss", "core_fn", "trainer_fn"} <= set(FAMILIES)
    assert len(CASES) > 300
