"""The training engine on several ranks: the same outputs, losses, gradient norms and weights as plain transformers alone."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engines.train.train_engine import MicroBatching
from tests.engines.train import audit_cases, cases
from tests.engines.train.cases import Case, Reference
from tests.engines.train.ranks import Ranks
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.first

TOKENS = MicroBatching(max_tokens=24)
CASES = [
    Case(world=2),
    Case(world=2, micro=TOKENS, checkpointing=True),
    Case(world=2, kind="scalar", micro=TOKENS),
    Case(world=2, sp=2, micro=MicroBatching()),
    Case(world=2, sp=2, kind="scalar", checkpointing=True),
    Case(world=2, num_real=4),
    Case(world=4),
    Case(world=4, micro=TOKENS),
    Case(world=4, packed=False, kind="scalar"),
    Case(world=4, fsdp={"fsdp_size": 2, "reshard_after_forward": False}),
    Case(world=4, fsdp={"fsdp_size": 1}, micro=TOKENS),
    Case(world=4, fsdp={"forward_prefetch": True}, checkpointing=True),
    Case(world=4, sp=2, micro=TOKENS, checkpointing=True),
    Case(world=4, sp=2, kind="scalar", fsdp={"fsdp_size": 2}),
    Case(world=4, sp=4, micro=MicroBatching(max_tokens=8), checkpointing=True),
    Case(world=4, sp=4, kind="scalar", micro=MicroBatching(num_rows=2)),
    Case(world=2, frozen="self_attn"),
    Case(world=2, lora=4),
    Case(world=2, lora=4, kind="scalar", micro=TOKENS, checkpointing=True),
    Case(world=4, lora=4, sp=2, fsdp={"fsdp_size": 2}, micro=TOKENS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., dict[str, Any]]:
    return cache(lambda *settings: Reference(folder, *settings).run())


def assert_same_weights(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """AdamW steps by lr * gradient / |gradient|: one element in a thousand may have a gradient of rounding errors alone."""
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        gap = np.abs(got[name] - weight)
        assert np.mean(gap > tolerance) < 1e-3, f"{name}: {gap.max()}"
        assert gap.mean() < tolerance, f"{name}: {gap.mean()}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_as_one_process(case: Case, folder: Path, ranks: Ranks, reference: Callable[..., Any]) -> None:
    expected = reference(case.kind, case.num_real, case.frozen, case.lora)
    results = ranks.run(case.world, cases.train, folder, case)
    for result in results:
        for name, values in expected["outputs"].items():
            np.testing.assert_allclose(result["outputs"][name][: case.num_real], values, atol=1e-5, rtol=1e-5)
            assert not result["outputs"][name][case.num_real :].any()
        np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
        assert_same_weights(result["weights"], expected["weights"], 1e-5)


@pytest.mark.parametrize("case", [Case(world=2, lora=4), Case(world=2, sp=2)], ids=str)
def test_ranks_audit_together(case: Case, folder: Path, ranks: Ranks) -> None:
    audit_cases.check(ranks.run(case.world, audit_cases.audited, folder, case))


def test_mixed_precision_keeps_masters_and_agrees_with_one_rank(folder: Path, ranks: Ranks) -> None:
    alone = cases.train(folder, Case(compute=torch.bfloat16))
    for case in [
        Case(world=2, compute=torch.bfloat16),
        Case(world=4, sp=2, compute=torch.bfloat16, checkpointing=True),
    ]:
        result = ranks.run(case.world, cases.train, folder, case)[0]
        np.testing.assert_allclose(result["steps"], alone["steps"], rtol=0.05, atol=0.02)
        for name, weight in alone["weights"].items():
            assert result["weights"][name].dtype == np.float32
            assert np.abs(result["weights"][name] - weight).mean() < 5e-4, name


def test_tied_weights_are_trained_saved_and_handed_out_once(tmp_path: Path, ranks: Ranks) -> None:
    folder = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    expected = Reference(folder, "policy").run()
    result = ranks.run(2, cases.train, folder, Case(world=2))[1]
    assert "lm_head.weight" not in expected["weights"]
    np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
    assert_same_weights(result["weights"], expected["weights"], 1e-5)
    uninterrupted = ranks.run(2, cases.save_and_go_on, folder, Case(world=2), tmp_path)[0]
    resumed = cases.load_and_go_on(folder, Case(), tmp_path)
    assert_same_weights(resumed["weights"], uninterrupted["weights"], 1e-6)
    exported = ranks.run(2, cases.exported, folder, Case(world=2))[0]
    assert exported.keys() == expected["weights"].keys()


def test_scores_at_the_last_token_of_a_model_that_only_computes(folder: Path, ranks: Ranks) -> None:
    alone = cases.scores(folder, Case(kind="scalar"))
    for case in [Case(world=2, kind="scalar"), Case(world=4, sp=4, kind="scalar", micro=TOKENS)]:
        for scores in ranks.run(case.world, cases.scores, folder, case):
            np.testing.assert_allclose(scores, alone, atol=1e-6)


@pytest.mark.parametrize(("fsdp_size", "lora"), [(-1, 0), (2, 0), (-1, 4)])
def test_gathered_weights_generate_on_any_number_of_rows_a_rank(
    fsdp_size: int, lora: int, folder: Path, ranks: Ranks
) -> None:
    """Rank r decodes r rows, so that rank 0 only takes part in gathering; training goes on afterwards."""
    case = Case(world=4, fsdp={"fsdp_size": fsdp_size}, lora=lora)
    results = ranks.run(4, cases.decode_then_train, folder, case)
    expected = cases.decode_then_train(folder, Case(lora=lora))
    for rank, (tokens, step) in enumerate(results):
        assert tokens == expected[0][:rank]
        np.testing.assert_allclose(step, expected[1], atol=1e-5, rtol=1e-5)


def test_ranks_have_the_whole_base_in_4_bits_and_shards_of_its_adapters(
    folder: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Against one process, which tests/models/test_four_bit.py compares with peft."""
    pytest.importorskip("bitsandbytes")
    case, alone = (Case(world=world, lora=4, load_in_4bit=True) for world in (2, 1))
    expected = cases.train(folder, alone)
    for result in ranks.run(2, cases.train, folder, case):
        np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
        assert_same_weights(result["weights"], expected["weights"], 1e-5)
    decoded = ranks.run(2, cases.decode_then_train, folder, case)
    tokens, step = cases.decode_then_train(folder, alone)
    assert [found[0] for found in decoded] == [tokens[:0], tokens[:1]]
    np.testing.assert_allclose(decoded[0][1], step, atol=1e-5, rtol=1e-5)
    saved = ranks.run(2, cases.save_and_go_on, folder, case, tmp_path)[0]
    np.testing.assert_allclose(cases.load_and_go_on(folder, alone, tmp_path)["step"], saved["step"], rtol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Case(world=4), Case()),
        (Case(world=4, fsdp={"fsdp_size": 2}), Case(world=2)),
        (Case(world=4, sp=2), Case(world=4, fsdp={"fsdp_size": 2}, micro=TOKENS)),
        (Case(), Case(world=2)),
        (Case(kind="scalar"), Case(world=4, kind="scalar", fsdp={"fsdp_size": 2})),
        (Case(world=2, kind="scalar"), Case(kind="scalar")),
        (Case(world=2, frozen="mlp"), Case(world=4, frozen="mlp")),
        (Case(world=4, compute=torch.bfloat16), Case(compute=torch.bfloat16)),
        (Case(world=2, lora=4), Case(lora=4)),
        (Case(lora=4, compute=torch.bfloat16), Case(world=2, lora=4, compute=torch.bfloat16)),
    ],
    ids=str,
)
def test_a_checkpoint_moves_to_another_number_of_ranks(
    before: Case, after: Case, folder: Path, tmp_path: Path, ranks: Ranks
) -> None:
    def run(case: Case, function: Callable[..., Any], *args: Any) -> Any:
        return ranks.run(case.world, function, *args)[0] if case.world > 1 else function(*args)

    uninterrupted = run(before, cases.save_and_go_on, folder, before, tmp_path)
    resumed = run(after, cases.load_and_go_on, folder, after, tmp_path)
    tolerance = 1e-6 if before.compute == torch.float32 else 5e-3
    assert resumed["learning_rate"] == uninterrupted["learning_rate"]
    np.testing.assert_allclose(resumed["step"], uninterrupted["step"], rtol=10 * tolerance)
    assert_same_weights(resumed["weights"], uninterrupted["weights"], tolerance)


def test_a_rank_without_saved_generators_takes_those_of_rank_0(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(2, cases.save_and_go_on, folder, Case(world=2), tmp_path)
    first, second, third, fourth = ranks.run(4, cases.draw_after_load, folder, Case(world=4), tmp_path)
    assert first == third == fourth != second


def test_weights_for_export_are_whole(folder: Path, ranks: Ranks) -> None:
    expected = cases.exported(folder, Case())
    for found in ranks.run(2, cases.exported, folder, Case(world=2)):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(world=4, fsdp={"fsdp_size": 3}), r"fsdp_config\.fsdp_size=3 does not divide the 4 ranks .*divisor of 4"),
        (Case(world=2, fsdp={"fsdp_size": 0}), r"fsdp_config\.fsdp_size=0 does not divide the 2 ranks"),
        (Case(world=4, sp=3), "ulysses_sequence_parallel_size=3 does not divide the 4 ranks"),
        (Case(world=2, sp=2, packed=False), "ulysses_sequence_parallel_size=2 .* set model.use_remove_padding=true"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_ranks_are_refused(case: Case, message: str, folder: Path, ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=message):
        ranks.run(case.world, cases.build_only, folder, case)


def test_a_sequence_beyond_the_token_budget_stops_every_rank(folder: Path, ranks: Ranks) -> None:
    """Rank 1 has only padding and no such sequence; it must not wait for the others."""
    case = Case(world=2, num_real=4, micro=MicroBatching(max_tokens=8))
    first, second = ranks.run(2, cases.refusal, folder, case)
    assert "has 10 tokens, more than the budget of 8 tokens" in first
    assert "a sequence on another rank has more than the budget of 8 tokens" in second
    assert "raise *_max_token_len_per_gpu" in second


def test_heads_that_do_not_divide_among_ranks_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    folder = save_tiny_model(tmp_path, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(
        ValueError, match=r"ulysses_sequence_parallel_size=4: .*2 attention heads .*set it to one of 1, 2"
    ):
        ranks.run(4, cases.build_only, folder, Case(world=4, sp=4))


def test_ranks_know_their_place(folder: Path, ranks: Ranks) -> None:
    assert ranks.run(4, cases.place, folder, Case(world=4, sp=2)) == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]
    assert cases.place(folder, Case()) == (0, 1, 0)


def test_a_process_cannot_join_as_another_rank(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="rank 5 of 8 cannot join: this process is already rank 0 of 2"):
        ranks.run(2, cases.join_again)
