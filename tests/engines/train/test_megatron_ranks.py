"""The Megatron engine on several ranks: the same outputs, losses, gradient norms and weights as plain transformers alone."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.engines.train.train_engine import MicroBatching
from tests.engines.train import audit_cases, cases, megatron_faults
from tests.engines.train.cases import Case, Reference
from tests.engines.train.ranks import Ranks
from tests.tiny import SIZES, tiny_tokenizer

pytest.importorskip("megatron.core")

TOKENS = MicroBatching(max_tokens=24)
TWO_ROWS = MicroBatching(num_rows=2)


def layout(tp: int = 1, pp: int = 1, ep: int = 1, **others: Any) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    return {**sizes, **others}


FAST = [
    ("qwen2", Case(world=2, megatron=layout(tp=2), micro=TOKENS)),
    ("qwen2", Case(world=2, megatron=layout(pp=2), micro=TWO_ROWS)),
]
PLAIN = {"use_distributed_optimizer": False}
SLOW = [
    ("llama", Case(megatron=layout())),
    ("qwen2-tied", Case(megatron=layout(**PLAIN), micro=TOKENS)),
    ("mixtral", Case(megatron=layout(), micro=TOKENS)),
    ("qwen2_moe", Case(megatron=layout(), micro=TOKENS)),
    ("qwen3_moe", Case(megatron=layout(), checkpointing=True)),
    ("qwen3", Case(world=2, megatron=layout(tp=2, sequence_parallel=False), micro=TOKENS)),
    ("qwen3-tied", Case(world=2, megatron=layout(tp=2), checkpointing=True, micro=TOKENS)),
    ("llama", Case(world=2, megatron=layout(tp=2), kind="scalar", micro=TOKENS)),
    ("qwen3-tied", Case(world=2, megatron=layout(pp=2), micro=TOKENS)),
    ("mistral", Case(world=2, megatron=layout(pp=2), kind="scalar", checkpointing=True)),
    ("qwen2", Case(world=2, megatron=layout(), micro=TOKENS)),
    ("qwen2", Case(world=2, megatron=layout(**PLAIN))),
    ("qwen3_moe", Case(world=2, megatron=layout(ep=2), micro=TOKENS)),
    ("qwen2_moe", Case(world=2, megatron=layout(tp=2), micro=TOKENS)),
    ("mixtral", Case(world=2, megatron=layout(tp=2, ep=2, expert_tensor_parallel_size=1))),
    ("qwen2-tied", Case(world=4, megatron=layout(tp=2, pp=2), micro=TOKENS)),
    ("llama", Case(world=4, megatron=layout(tp=2), micro=TOKENS)),
    ("qwen3", Case(world=4, megatron=layout(pp=2), kind="scalar", micro=TWO_ROWS)),
    ("qwen3_moe", Case(world=4, megatron=layout(tp=2, ep=2, expert_tensor_parallel_size=1), micro=TOKENS)),
    ("qwen2_moe", Case(world=4, megatron=layout(tp=2, ep=2, expert_tensor_parallel_size=2), micro=TOKENS)),
    ("qwen3_moe", Case(world=4, megatron=layout(pp=2, ep=2), micro=TOKENS, checkpointing=True)),
]


def save_family(folder: Path, family: str) -> Path:
    """A tiny model whose vocabulary of 259 does not divide by two ranks, with norms and biases that are not one and zero."""
    kind = family.removesuffix("-tied")
    changes: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": kind == "qwen3_moe"}
    if kind == "mixtral":
        changes |= {"num_local_experts": 4}
    elif kind.endswith("moe"):
        changes |= {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
    else:
        changes = {}
    config = AutoConfig.for_model(
        kind,
        **SIZES,
        **changes,
        vocab_size=259,
        tie_word_embeddings=family.endswith("-tied"),
        max_position_embeddings=256,
        sliding_window=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.2) + (parameter == 1))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: save_family(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def reference(folder: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    return cache(lambda family, kind: Reference(folder(family), kind).run())


def run(ranks: Ranks, case: Case, function: Callable[..., Any], *args: Any) -> Any:
    return ranks.run(case.world, function, *args) if case.world > 1 else [function(*args)]


def name_of(value: Any) -> str:
    return str(value)


@pytest.mark.parametrize(
    ("family", "case"), [*FAST, *(pytest.param(*case, marks=pytest.mark.megatron) for case in SLOW)], ids=name_of
)
def test_every_layout_trains_as_transformers(
    family: str, case: Case, folder: Callable[[str], Path], ranks: Ranks, reference: Callable[..., Any]
) -> None:
    expected = reference(family, case.kind)
    for result in run(ranks, case, cases.train, folder(family), case):
        for name, values in expected["outputs"].items():
            np.testing.assert_allclose(result["outputs"][name][: case.num_real], values, atol=1e-5, rtol=1e-5)
            assert not result["outputs"][name][case.num_real :].any()
        np.testing.assert_allclose(result["steps"], expected["steps"], atol=1e-5, rtol=1e-5)
        assert_same_weights(result["weights"], expected["weights"], 1e-5)


def assert_same_weights(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """AdamW steps by lr * gradient / |gradient|: one element in a thousand may have a gradient of rounding errors alone."""
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        gap = np.abs(got[name] - weight)
        assert np.mean(gap > tolerance) < 1e-3, f"{name}: {gap.max()}"
        assert gap.mean() < tolerance, f"{name}: {gap.mean()}"


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("fault", "family", "sizes", "message"),
    [
        ("no sum of head norms", "qwen3", layout(tp=2, sequence_parallel=False), r"gradient of \S+[qk]_norm"),
        ("no sum of tied embeddings", "qwen2-tied", layout(pp=2), r"gradient of \S+embed_tokens"),
        ("padding in the softmax", "llama", layout(tp=2), "its (log_probs|entropy) differs"),
        ("attention across rows", "llama", layout(), "its log_probs differs"),
        ("norm without the mark of sequence parallelism", "llama", layout(tp=2), r"gradient of \S+norm"),
    ],
    ids=str,
)
def test_a_planted_fault_is_refused_when_the_model_is_loaded(
    fault: str, family: str, sizes: dict[str, Any], message: str, folder: Callable[[str], Path], ranks: Ranks
) -> None:
    case = Case(world=2, megatron=sizes)
    for said in ranks.run(2, megatron_faults.refusal, folder(family), case, fault):
        assert re.search(f"differently from transformers .*{message}", said), said


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("qwen2", Case(world=2, megatron=layout(tp=2)), Case(world=2, megatron=layout(tp=2))),
        ("qwen2-tied", Case(world=4, megatron=layout(tp=2, pp=2)), Case(megatron=layout())),
        ("qwen3", Case(megatron=layout()), Case(world=4, megatron=layout(tp=2))),
        ("qwen3_moe", Case(world=4, megatron=layout(pp=2, ep=2)), Case(world=2, megatron=layout(tp=2))),
        ("qwen2", Case(world=2, megatron=layout()), Case(world=2)),
        ("qwen2-tied", Case(world=2, megatron=layout(pp=2, **PLAIN)), Case()),
        ("qwen2-tied", Case(world=2), Case(world=2, megatron=layout(pp=2))),
        ("qwen2", Case(world=4), Case(world=4, megatron=layout(tp=2))),
        ("qwen3_moe", Case(world=2), Case(world=4, megatron=layout(tp=2, ep=2, expert_tensor_parallel_size=1))),
        ("qwen2", Case(kind="scalar"), Case(world=2, kind="scalar", megatron=layout(pp=2))),
        ("qwen2", Case(world=2, kind="scalar", megatron=layout(tp=2)), Case(kind="scalar")),
        (
            "qwen2-tied",
            Case(world=2, compute=torch.bfloat16, megatron=layout(pp=2)),
            Case(world=2, compute=torch.bfloat16, megatron=layout(pp=2)),
        ),
        (
            "qwen2",
            Case(world=2, compute=torch.bfloat16, megatron=layout()),
            Case(world=2, compute=torch.bfloat16, megatron=layout()),
        ),
    ],
    ids=name_of,
)
def test_a_checkpoint_moves_to_another_layout_and_engine(
    family: str, before: Case, after: Case, folder: Callable[[str], Path], tmp_path: Path, ranks: Ranks
) -> None:
    saved = run(ranks, before, cases.save_and_go_on, folder(family), before, tmp_path)[0]
    resumed = run(ranks, after, cases.load_and_go_on, folder(family), after, tmp_path)[0]
    assert resumed["learning_rate"] == saved["learning_rate"]
    np.testing.assert_allclose(resumed["step"], saved["step"], rtol=1e-5)
    assert_same_weights(resumed["weights"], saved["weights"], 1e-6)
    if before == after:
        assert resumed["step"] == saved["step"]
        assert all(np.array_equal(resumed["weights"][name], weight) for name, weight in saved["weights"].items())


@pytest.mark.megatron
def test_mixed_precision_keeps_float32_masters_and_agrees_with_fsdp(
    folder: Callable[[str], Path], ranks: Ranks
) -> None:
    alone = cases.train(folder("llama"), Case(compute=torch.bfloat16))
    for case in [
        Case(compute=torch.bfloat16, megatron=layout(**PLAIN)),
        Case(world=2, compute=torch.bfloat16, megatron=layout()),
        Case(world=2, compute=torch.bfloat16, megatron=layout(tp=2), checkpointing=True),
    ]:
        result = run(ranks, case, cases.train, folder("llama"), case)[0]
        np.testing.assert_allclose(result["steps"], alone["steps"], rtol=0.05, atol=0.05)
        for name, weight in alone["weights"].items():
            assert result["weights"][name].dtype == np.float32
            assert np.abs(result["weights"][name] - weight).mean() < 5e-4, name


@pytest.mark.megatron
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_an_exported_folder_of_experts_has_the_names_and_bits_of_its_source(
    family: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    cases.build_engine(folder(family), Case(megatron=layout())).export(tmp_path, tiny_tokenizer())
    source, exported = (load_file(path / "model.safetensors") for path in (folder(family), tmp_path / "huggingface"))
    assert source.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())


@pytest.mark.megatron
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3_moe"])
def test_weights_are_handed_out_and_exported_bit_for_bit(
    family: str, folder: Callable[[str], Path], ranks: Ranks
) -> None:
    expected = cases.exported(folder(family), Case())
    for sizes in (layout(tp=2), layout(pp=2)):
        for found in ranks.run(2, cases.exported, folder(family), Case(world=2, megatron=sizes)):
            assert list(found) == list(expected)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.megatron
@pytest.mark.parametrize("sizes", [layout(tp=2), layout(pp=2), layout()], ids=str)
def test_ranks_audit_together(sizes: dict[str, Any], folder: Callable[[str], Path], ranks: Ranks) -> None:
    case = Case(world=2, megatron=sizes)
    audit_cases.check(ranks.run(2, audit_cases.audited, folder("qwen2"), case), has_frozen=False)


@pytest.mark.megatron
@pytest.mark.parametrize("sizes", [layout(tp=2), layout(pp=2)], ids=str)
def test_the_rollout_decodes_with_the_gathered_weights(
    sizes: dict[str, Any], folder: Callable[[str], Path], ranks: Ranks
) -> None:
    """Rank r decodes r rows; training goes on afterwards."""
    tokens, step = cases.decode_then_train(folder("qwen2"), Case())
    for rank, found in enumerate(ranks.run(2, cases.decode_then_train, folder("qwen2"), Case(world=2, megatron=sizes))):
        assert found[0] == tokens[:rank]
        np.testing.assert_allclose(found[1], step, atol=1e-5, rtol=1e-5)


@pytest.mark.megatron
def test_scores_at_the_last_token_of_a_model_that_only_computes(folder: Callable[[str], Path], ranks: Ranks) -> None:
    alone = cases.scores(folder("qwen2"), Case(kind="scalar"))
    for sizes in (layout(tp=2), layout(pp=2)):
        for scores in ranks.run(2, cases.scores, folder("qwen2"), Case(world=2, kind="scalar", megatron=sizes)):
            np.testing.assert_allclose(scores, alone, atol=1e-6)


@pytest.mark.megatron
def test_ranks_know_their_place(folder: Callable[[str], Path], ranks: Ranks) -> None:
    """megatron's order: pipeline stages are furthest apart."""
    places = ranks.run(4, cases.place, folder("qwen2"), Case(world=4, megatron=layout(pp=2)))
    assert places == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]
    places = ranks.run(4, cases.place, folder("qwen2"), Case(world=4, megatron=layout(tp=2)))
    assert places == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]


@pytest.mark.megatron
def test_two_engines_of_a_process_have_one_layout(folder: Callable[[str], Path], ranks: Ranks) -> None:
    first, second = Case(world=2, megatron=layout(tp=2)), Case(world=2, megatron=layout(pp=2))
    assert ranks.run(2, megatron_faults.refusal_beside, folder("qwen2"), first, first) == ["", ""]
    said = ranks.run(2, megatron_faults.refusal_beside, folder("qwen2"), first, second)[0]
    assert re.search("pipeline_model_parallel_size=2; but .* tensor_model_parallel_size=2.* Set the same sizes", said)
    assert ranks.run(2, megatron_faults.refusal_beside, folder("qwen2"), second, second) == ["", ""]
