"""The decoder without its modules: which models have one, and that it follows the weights."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from lockstep.engines.rollout.embedded import flat_parts
from lockstep.engines.rollout.embedded.flat_decoder import FlatDecoder, flat_form, flat_head
from lockstep.engines.rollout.embedded.flat_heads import HeadColumns, HeadRows
from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.models.attention import PackedAttention
from lockstep.models.log_probs import VocabularyHead
from tests.engines.rollout.rollout_cases import CONFIGS, embedded, mixed_requests, naive_log_probs, tiny_model

USUAL = {"qwen2": False, "qwen3": False, "llama": False, "mistral": False, "smollm": False, "gemma": True}


def hidden(forward: Any) -> torch.Tensor:
    ids = torch.tensor([[7, 3, 50, 9, 9, 4, 8]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    out: torch.Tensor = forward(ids, positions, PackedAttention([4, 3], ids.device))
    return out


@pytest.mark.parametrize("largest_copy", [0, flat_parts.LARGEST_COPY])
@pytest.mark.parametrize("kind", list(USUAL))
@torch.no_grad()
def test_usual_decoders_are_flat_and_compute_the_same(
    kind: str, largest_copy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_parts, "LARGEST_COPY", largest_copy)
    model = tiny_model(kind).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which begin all alike
            parameter.add_(0.3 * torch.randn_like(parameter))
    runner = ModelRunner(model, block_size=4)
    form = flat_form(model.get_decoder(), runner.forward)
    assert form is not None and form.offset is USUAL[kind]
    for _ in range(2):
        flat = FlatDecoder(model.get_decoder(), form)
        for _ in range(2):  # the second call finds the rooms of the first
            torch.testing.assert_close(hidden(flat), hidden(runner.forward), atol=2e-5, rtol=1e-5)
        for parameter in model.parameters():
            parameter.mul_(1.1)


@torch.no_grad()
def test_layers_of_different_sizes_and_calls_of_different_lengths() -> None:
    """Layers of a size share a room, which is kept for calls of as many tokens."""
    model = tiny_model("llama", num_hidden_layers=3).eval()
    config = deepcopy(model.config)
    config.intermediate_size = 40
    model.get_decoder().layers[1].mlp = type(model.get_decoder().layers[1].mlp)(config)
    runner = ModelRunner(model, block_size=4)
    form = flat_form(model.get_decoder(), runner.forward)
    assert form is not None
    flat = FlatDecoder(model.get_decoder(), form)
    for seed, length in enumerate((6, 2, 2, 6)):
        ids = torch.randint(50, (1, length), generator=torch.Generator().manual_seed(seed))
        got, expected = (
            forward(ids, torch.arange(length)[None], PackedAttention([length], ids.device))
            for forward in (flat, runner.forward)
        )
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_rotary_of_longer_and_longer_positions() -> None:
    """They come from a table that grows."""
    parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=parameters, max_position_embeddings=16).eval()
    own, columns, rows = model.get_decoder().rotary_emb, HeadColumns.table(), HeadRows.table()
    for positions in (torch.arange(5)[None], torch.tensor([[40, 3]]), torch.tensor([[90, 50, 1]])):
        cos, sin = own(torch.zeros(1), positions)
        [(turned_cos, turned_sin)] = HeadColumns.by_step(columns(own, torch.zeros(1), positions), 1)
        half = len(turned_sin) // 2
        torch.testing.assert_close(turned_cos, cos[0].t())
        torch.testing.assert_close(torch.cat((-turned_sin[:half], turned_sin[half:])), sin[0].t())
        [numbers] = HeadRows.by_step(rows(own, torch.zeros(1), positions), 1)
        torch.testing.assert_close(numbers[:, 0].repeat(1, 2), torch.complex(cos[0], sin[0]))


def test_others_keep_their_own_forward() -> None:
    for kind in ("phi", "phi3", "mixtral", "qwen3_moe"):
        model = tiny_model(kind).eval()
        assert flat_form(model.get_decoder(), ModelRunner(model, 4).forward) is None
    half = tiny_model("llama").config.head_dim // 2
    longrope = {"short_factor": [1.0] * half, "long_factor": [3.0] * half, "original_max_position_embeddings": 16}
    for moving in ({"rope_type": "dynamic"}, {"rope_type": "longrope"} | longrope):
        model = tiny_model("llama", rope_parameters=moving | {"rope_theta": 10000.0, "factor": 4.0}).eval()
        assert flat_form(model.get_decoder(), ModelRunner(model, 4).forward) is None
    model = tiny_model("granite", residual_multiplier=0.5).eval()  # the usual parts, put together otherwise
    assert flat_form(model.get_decoder(), ModelRunner(model, 4).forward) is None


def test_a_model_that_does_otherwise_far_out_keeps_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ministral scales its queries from a position of its own on."""
    scaling = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
    scaling["original_max_position_embeddings"] = 8
    ministral = pytest.importorskip("transformers.models.ministral3").Ministral3Config
    monkeypatch.setitem(CONFIGS, "ministral", lambda **sizes: ministral(**sizes, rope_parameters=scaling))
    model = tiny_model("ministral").eval()
    assert flat_form(model.get_decoder(), ModelRunner(model, 4).forward) is None


def test_weights_are_let_go_after_serving() -> None:
    runner = ModelRunner(tiny_model(), block_size=4)
    with runner.serving():
        assert runner._flat is not None and runner.logits is not runner._head
    assert runner._flat is None and runner.logits is runner._head


@pytest.mark.parametrize("largest_copy", [0, flat_parts.LARGEST_COPY])
@pytest.mark.parametrize("how", [{}, {"cap": 3.0}, {"factor": 0.5}, {"bias": True}, {"dtype": torch.bfloat16}])
@torch.no_grad()
def test_heads_compute_the_same_from_columns(
    how: dict[str, Any], largest_copy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_parts, "LARGEST_COPY", largest_copy)
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 50, bias=how.get("bias", False), dtype=how.get("dtype"))
    head = VocabularyHead(linear, cap=how.get("cap"), factor=how.get("factor"))
    columns = torch.randn(16, 5, dtype=how.get("dtype"))
    torch.testing.assert_close(flat_head(head)(columns.t()), head(columns.t().contiguous()))


def test_bfloat16() -> None:
    model = tiny_model("llama").bfloat16()
    assert flat_form(model.get_decoder(), ModelRunner(model, 4).forward) is not None
    requests = mixed_requests()
    for request, completion in zip(requests, embedded(model).generate(requests)):
        got = torch.tensor(completion.log_probs)
        torch.testing.assert_close(got, naive_log_probs(model, request, completion), atol=0.3, rtol=0)
        assert (got - naive_log_probs(model, request, completion)).abs().mean() < 0.06
