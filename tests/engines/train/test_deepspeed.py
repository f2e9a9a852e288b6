"""The DeepSpeed engine on two ranks, at every ZeRO stage: the numbers of plain transformers in one process."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.engines.train.train_engine import MicroBatching
from tests.engines.train import cases
from tests.engines.train.cases import Case, Reference
from tests.engines.train.ranks import Ranks
from tests.engines.train.test_fsdp_ranks import assert_same_weights
from tests.tiny import save_tiny_model

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.deepspeed

TOKENS = MicroBatching(max_tokens=24)
STAGES = [{"zero_stage": stage} for stage in range(4)]
OFFLOADED = {"param_offload": True, "optimizer_offload": True}
CASES = [
    *(Case(world=2, zero=zero) for zero in STAGES),
    *(Case(world=2, zero=zero, kind="scalar", micro=TOKENS, checkpointing=True) for zero in STAGES),
    *(Case(world=2, zero={"zero_stage": stage, "optimizer_offload": True}) for stage in (1, 2)),
    Case(world=2, zero={"zero_stage": 3, **OFFLOADED}, micro=TOKENS),
    Case(world=2, zero={"zero_stage": 2}, packed=False, num_real=4),
    Case(world=2, zero={"zero_stage": 3}, packed=False, micro=MicroBatching(num_rows=3)),
    Case(world=2, zero={"zero_stage": 3}, frozen="self_attn"),
    Case(world=2, zero={"zero_stage": 2}, frozen="self_attn"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., dict[str, Any]]:
    return cache(lambda *settings: Reference(folder, *settings).run())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_as_one_process(case: Case, folder: Path, ranks: Ranks, reference: Callable[..., Any]) -> None:
    expected = reference(case.kind, case.num_real, case.frozen)
    for result in ranks.run(case.world, cases.train, folder, case):
        for name, values in expected["outputs"].items():
            np.testing.assert_allclose(result["outputs"][name][: case.num_real], values, atol=1e-5, rtol=1e-5)
            assert not result["outputs"][name][case.num_real :].any()
        np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
        assert_same_weights(result["weights"], expected["weights"], 1e-5)
