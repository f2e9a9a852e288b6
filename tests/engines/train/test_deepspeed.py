"""The DeepSpeed engine on two ranks, at every ZeRO stage: the numbers of plain transformers in one process."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engines.train.train_engine import MicroBatching
from tests.engines.train import audit_cases, cases, route_cases
from tests.engines.train.cases import Case, Reference
from tests.engines.train.ranks import Ranks
from tests.engines.train.route_cases import RouteReference
from tests.engines.train.test_fsdp_ranks import assert_same_weights
from tests.tiny import save_tiny_model, save_tiny_moe

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
    Case(world=2, zero={"zero_stage": 3}, num_real=4, micro=MicroBatching(num_rows=3)),
    Case(world=2, zero={"zero_stage": 3}, frozen="self_attn"),
    Case(world=2, zero={"zero_stage": 2}, frozen="self_attn"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


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


def run(ranks: Ranks, case: Case, function: Callable[..., Any], *args: Any) -> Any:
    """What `function` gives on the first rank, or in this process."""
    return ranks.run(case.world, function, *args)[0] if case.world > 1 else function(*args)


@pytest.mark.parametrize("zero", STAGES, ids=str)
def test_ranks_audit_together(zero: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    audit_cases.check(ranks.run(2, audit_cases.audited, folder, Case(world=2, zero=zero)))


@pytest.mark.parametrize("zero", STAGES, ids=str)
def test_a_checkpoint_restores_the_next_step_bit_for_bit(
    zero: dict[str, Any], folder: Path, tmp_path: Path, ranks: Ranks
) -> None:
    case = Case(world=2, zero=zero)
    uninterrupted = run(ranks, case, cases.save_and_go_on, folder, case, tmp_path)
    resumed = run(ranks, case, cases.load_and_go_on, folder, case, tmp_path)
    assert resumed["step"] == uninterrupted["step"] and resumed["learning_rate"] == uninterrupted["learning_rate"]
    for name, weight in uninterrupted["weights"].items():
        assert np.array_equal(resumed["weights"][name], weight), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Case(world=2, zero={"zero_stage": 3}), Case(world=2, zero={"zero_stage": 1})),
        (Case(world=2, zero={"zero_stage": 1}), Case(world=2, zero={"zero_stage": 3, **OFFLOADED})),
        (Case(world=2, zero={"zero_stage": 3}), Case(world=2)),
        (Case(world=2), Case(world=2, zero={"zero_stage": 3})),
        (Case(world=2, zero={"zero_stage": 2}), Case()),
        (Case(), Case(world=2, zero={"zero_stage": 2})),
        (Case(kind="scalar"), Case(world=2, kind="scalar", zero={"zero_stage": 3})),
        (Case(world=2, kind="scalar", zero={"zero_stage": 0}), Case(kind="scalar")),
        (Case(world=2, frozen="mlp", zero={"zero_stage": 3}), Case(world=2, frozen="mlp")),
    ],
    ids=str,
)
def test_a_checkpoint_moves_to_another_stage_or_engine(
    before: Case, after: Case, folder: Path, tmp_path: Path, ranks: Ranks
) -> None:
    uninterrupted = run(ranks, before, cases.save_and_go_on, folder, before, tmp_path)
    resumed = run(ranks, after, cases.load_and_go_on, folder, after, tmp_path)
    assert resumed["learning_rate"] == uninterrupted["learning_rate"]
    np.testing.assert_allclose(resumed["step"], uninterrupted["step"], rtol=1e-5)
    assert_same_weights(resumed["weights"], uninterrupted["weights"], 1e-6)


@pytest.mark.parametrize("zero", STAGES, ids=str)
def test_a_gradient_that_is_not_finite_stops_every_rank_and_changes_nothing(
    zero: dict[str, Any], folder: Path, ranks: Ranks
) -> None:
    for message, changed in ranks.run(2, cases.not_finite, folder, Case(world=2, zero=zero)):
        assert "gradient norm is nan" in message
        assert not changed


@pytest.mark.parametrize("zero", STAGES, ids=str)
def test_actor_critic_and_reference_share_a_process(
    zero: dict[str, Any], folder: Path, ranks: Ranks, reference: Callable[..., Any]
) -> None:
    case = Case(world=2, zero=zero)
    (result, _) = ranks.run(2, cases.roles_of_a_run, folder, case)
    for kind, steps in result["steps"].items():
        np.testing.assert_allclose(steps, reference(kind)["steps"], atol=1e-5, rtol=1e-5)
    for name, values in reference("policy")["outputs"].items():
        np.testing.assert_allclose(result["outputs"][name][: case.num_real], values, atol=1e-5, rtol=1e-5)
    assert result["reference"].keys() == reference("policy")["weights"].keys()


@pytest.mark.parametrize("zero", STAGES, ids=str)
def test_the_rollout_decodes_with_the_current_weights(zero: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Rank r decodes r rows; training goes on afterwards."""
    expected = cases.decode_then_train(folder, Case())
    for rank, (tokens, step) in enumerate(ranks.run(2, cases.decode_then_train, folder, Case(world=2, zero=zero))):
        assert tokens == expected[0][:rank]
        np.testing.assert_allclose(step, expected[1], atol=1e-5, rtol=1e-5)


def test_tied_weights_are_trained_saved_and_handed_out_once(tmp_path: Path, ranks: Ranks) -> None:
    folder = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    expected = Reference(folder, "policy").run()
    for zero in STAGES[1:]:
        case = Case(world=2, zero=zero)
        result = ranks.run(2, cases.train, folder, case)[1]
        np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
        assert_same_weights(result["weights"], expected["weights"], 1e-5)
        exported = ranks.run(2, cases.exported, folder, case)[0]
        assert exported.keys() == expected["weights"].keys()
    saved = ranks.run(2, cases.save_and_go_on, folder, case, tmp_path)[0]
    assert_same_weights(cases.load_and_go_on(folder, Case(), tmp_path)["weights"], saved["weights"], 1e-6)


def test_scores_at_the_last_token_of_a_model_that_only_computes(folder: Path, ranks: Ranks) -> None:
    alone = cases.scores(folder, Case(kind="scalar"))
    for zero in STAGES[::3]:
        for scores in ranks.run(2, cases.scores, folder, Case(world=2, kind="scalar", zero=zero)):
            np.testing.assert_allclose(scores, alone, atol=1e-6)


@pytest.mark.parametrize("zero", [*STAGES[1:], {"zero_stage": 3, **OFFLOADED}], ids=str)
def test_mixed_precision_keeps_float32_masters(zero: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    alone = cases.train(folder, Case(compute=torch.bfloat16))
    case = Case(world=2, compute=torch.bfloat16, zero=zero)
    before = ranks.run(2, cases.exported, folder, case)[0]
    for name, weight in cases.exported(folder, Case()).items():
        assert np.array_equal(before[name], weight), name  # not rounded to bfloat16
    result = ranks.run(2, cases.train, folder, case)[0]
    np.testing.assert_allclose(result["steps"], alone["steps"], rtol=0.05, atol=0.02)
    for name, weight in alone["weights"].items():
        assert result["weights"][name].dtype == np.float32
        assert np.abs(result["weights"][name] - weight).mean() < 5e-4, name


def test_a_users_json_is_merged_with_the_run(
    folder: Path, tmp_path: Path, ranks: Ranks, reference: Callable[..., Any]
) -> None:
    file = tmp_path / "zero3.json"
    file.write_text(
        '{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 1000, '
        '"reduce_bucket_size": "auto"}, "train_batch_size": "auto", "bf16": {"enabled": "auto"}, "gradient_clipping": 0.4}'
    )
    case = Case(world=2, zero={"zero_stage": 1, "config_path": str(file)})
    assert ranks.run(2, cases.zero_stage, folder, case) == [3, 3]
    result = ranks.run(2, cases.train, folder, case)[0]
    np.testing.assert_allclose(result["steps"], reference("policy")["steps"], atol=1e-5, rtol=1e-5)
    saved = ranks.run(2, cases.save_and_go_on, folder, case, tmp_path)[0]
    resumed = ranks.run(2, cases.load_and_go_on, folder, case, tmp_path)[0]
    assert resumed["step"] == saved["step"]


@pytest.mark.parametrize("stage", [2, 3])
def test_replayed_experts_and_their_balance_equal_a_naive_gate(stage: int, tmp_path: Path, ranks: Ranks) -> None:
    folder = save_tiny_moe(tmp_path)
    expected = RouteReference(folder).run()
    case = Case(world=2, zero={"zero_stage": stage}, micro=TOKENS, checkpointing=stage == 3)
    for result in ranks.run(2, route_cases.train, folder, case):
        for name, values in expected["outputs"].items():
            np.testing.assert_allclose(result["outputs"][name][: cases.NUM_REAL], values, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
        assert_same_weights(result["weights"], expected["weights"], 1e-5)
