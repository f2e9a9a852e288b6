"""Replayed experts and the load-balance loss in the training engine, against a naive gate in plain transformers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engines.train.train_engine import MicroBatching
from tests.engines.train import cases, route_cases
from tests.engines.train.cases import NUM_REAL, Case
from tests.engines.train.ranks import Ranks
from tests.engines.train.route_cases import KEY, RouteReference, make_batch
from tests.engines.train.test_fsdp_ranks import assert_same_weights
from tests.models.architectures import save_tiny_model as save_tiny_type
from tests.tiny import save_tiny_model, save_tiny_moe

TOKENS = MicroBatching(max_tokens=40)
ONE_PROCESS = [
    Case(),
    Case(micro=MicroBatching()),
    Case(micro=TOKENS, checkpointing=True),
    Case(micro=MicroBatching(num_rows=3), packed=False),
]
SEVERAL = [
    Case(world=2, micro=TOKENS),
    Case(world=2, checkpointing=True),
    Case(world=2, sp=2, micro=MicroBatching()),
    Case(world=2, packed=False),
    pytest.param(Case(world=4, sp=2, micro=TOKENS, checkpointing=True), marks=pytest.mark.slow),
    pytest.param(Case(world=4, fsdp={"fsdp_size": 2}), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., dict[str, Any]]:
    return cache(lambda aux: RouteReference(folder, aux).run())


def check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected["outputs"].items():
        np.testing.assert_allclose(result["outputs"][name][:NUM_REAL], values, atol=1e-5, rtol=1e-5, err_msg=name)
        assert not result["outputs"][name][NUM_REAL:].any()
    np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
    assert_same_weights(result["weights"], expected["weights"], 1e-5)


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("case", ONE_PROCESS, ids=str)
def test_replayed_experts_and_their_balance_equal_a_naive_gate(
    case: Case, aux: bool, folder: Path, reference: Callable[..., Any]
) -> None:
    check(route_cases.train(folder, case, aux), reference(aux))


def test_a_copy_in_the_compute_dtype_replays_too(folder: Path, reference: Callable[..., Any]) -> None:
    result = route_cases.train(folder, Case(compute=torch.bfloat16), True)
    for name, values in reference(True)["outputs"].items():
        assert np.abs(result["outputs"][name][:NUM_REAL] - values).mean() < 0.05, name
    np.testing.assert_allclose(result["steps"], reference(True)["steps"], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_ranks_train_as_one_process(case: Case, folder: Path, ranks: Ranks, reference: Callable[..., Any]) -> None:
    for result in ranks.run(case.world, route_cases.train, folder, case):
        check(result, reference(True))


@pytest.mark.parametrize("case", [Case(), Case(micro=TOKENS, checkpointing=True), Case(packed=False)], ids=str)
def test_replaying_the_own_experts_changes_no_bit(case: Case, folder: Path) -> None:
    plain, replayed = (route_cases.build_engine(folder, case) for _ in range(2))
    batch = make_batch(0).exclude("routed_experts")
    out = plain.forward(batch, case.micro, **cases.options(case), routes="record")
    routes = out.pop("routed_experts").short()
    for name, values in plain.forward(batch, case.micro, **cases.options(case)).items():
        assert torch.equal(out[name], values), name
    own = batch.clone()
    own["routed_experts"] = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, 18 - routes.shape[1]), value=-1)
    again = replayed.forward(own, case.micro, **cases.options(case), routes="replay")
    assert not again.pop("route_mismatch").any()
    for name, values in again.items():
        assert torch.equal(out[name], values), name
    steps = [
        route_cases.loss_and_norm(plain, case, batch),
        route_cases.loss_and_norm(replayed, case, own, routes="replay"),
    ]
    assert steps[0] == steps[1]
    before, after = cases.weights_of(plain), cases.weights_of(replayed)
    assert all((before[name] == after[name]).all() for name in before)


def test_a_recorded_row_is_that_of_any_split_layout_and_world_size(folder: Path, ranks: Ranks) -> None:
    alone = route_cases.recorded(folder, Case())
    lengths = make_batch(0)["attention_mask"].sum(-1)
    for row, length in zip(alone, lengths):
        assert (row[:length] >= 0).all() and (row[length:] == -1).all()
    for case in [Case(micro=MicroBatching()), Case(packed=False), Case(micro=TOKENS)]:
        np.testing.assert_array_equal(np.sort(route_cases.recorded(folder, case)), np.sort(alone))
    for case in [Case(world=2), Case(world=2, sp=2, micro=MicroBatching())]:
        for routes in ranks.run(2, route_cases.recorded, folder, case):
            np.testing.assert_array_equal(np.sort(routes), np.sort(alone))


def test_comparing_changes_nothing(folder: Path) -> None:
    engine = route_cases.build_engine(folder, Case())
    batch = make_batch(0)
    plain = engine.forward(batch, MicroBatching(), **cases.options(Case()))
    compared = engine.forward(batch, MicroBatching(), **cases.options(Case()), routes="compare")
    assert compared.pop("route_mismatch")[batch["response_mask"].bool()].mean() > 0.2
    for name, values in plain.items():
        assert torch.equal(values, compared[name])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (None, "mode: Qwen2ForCausalLM has no experts"),
        ("dbrx", "mode: the router of DbrxForCausalLM's transformer.blocks.0.ffn .* is not recognised"),
        ("longcat_flash", "mode: LongcatFlashTopkRouter does not choose its experts by one top-k"),
        ("qwen4_exp_text", "mode: qwen4_exp_text computes by its own forward"),
        ("phimoe", "mode: PhimoeTopKRouter does not choose its experts by one top-k"),
    ],
)
def test_models_whose_routers_cannot_be_read_are_refused(kind: str | None, message: str, tmp_path: Path) -> None:
    if kind is None:
        save_tiny_model(tmp_path)
    else:
        save_tiny_type(kind, tmp_path)
    with pytest.raises(ValueError, match=message):
        route_cases.build_engine(tmp_path, Case())
    assert KEY.endswith("router_replay.mode")
