"""Layers of one step give what their modules give, and the same gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lockstep.models import flat_layers
from lockstep.models.attention import ATTENTION_NAME, PackedAttention, no_mask
from lockstep.models.flat_layers import flatten_layers
from lockstep.models.host_layers import fuse_on_host
from tests.models.test_host_layers import SIZES

KINDS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "gemma": GemmaConfig(**SIZES),
}
LENGTHS = [9, 12, 7, 3, 1]
PREFIXES = [(0, 0), (0, 0), (0, 4), (9, 9), (9, 9)]


def model_of(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def flat_one(model: nn.Module) -> Any:
    flat = copy.deepcopy(model)
    fuse_on_host(flat)
    assert flatten_layers(flat) == 2
    return flat


def run(model: Any, lengths: list[int] = LENGTHS, prefixes: list[tuple[int, int]] = PREFIXES) -> Tensor:
    """Hidden states of the packed sequences; their gradients are the parameters'."""
    ids = torch.arange(sum(lengths))[None] * 7 % 64
    positions = [torch.arange(before, before + own) for own, (_, before) in zip(lengths, prefixes)]
    context = PackedAttention(lengths, ids.device, prefixes)
    out: Tensor = model.get_decoder()(
        input_ids=ids,
        position_ids=torch.cat(positions)[None],
        attention_mask=no_mask(ids.device),
        use_cache=False,
        lockstep_context=context,
    ).last_hidden_state
    if out.requires_grad:
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return out.detach()


def assert_same(model: Any, flat: Any, **how: Any) -> None:
    torch.testing.assert_close(run(flat, **how), run(model, **how), rtol=1e-4, atol=1e-4)
    for (name, one), other in zip(model.named_parameters(), flat.named_parameters()):
        torch.testing.assert_close(other[1].grad, one.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each layer that is computed in one step."""
    found: list[int] = []
    compute = flat_layers._compute
    monkeypatch.setattr(flat_layers, "_compute", lambda *args: (found.append(1), compute(*args))[1])
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_results_and_gradients_are_those_of_the_modules(kind: str, calls: list[int]) -> None:
    model = model_of(KINDS[kind])
    flat = flat_one(model)
    calls.clear()
    assert_same(model, flat)
    assert len(calls) == 2


def test_gradients_equal_finite_differences() -> None:
    flat = flat_one(model_of(KINDS["qwen2"]))
    run(flat)
    torch.manual_seed(1)
    for name, parameter in flat.model.layers.named_parameters():
        direction = torch.randn_like(parameter)
        direction *= 1e-2 / direction.norm()
        slope = float((parameter.grad * direction).sum())
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(sign * direction)
                out = run(flat).double()
                values.append(float((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()))
                parameter.sub_(sign * direction)
        assert abs((values[0] - values[1]) / 2 - slope) < 2e-2 * abs(slope) + 2e-4, name


@pytest.mark.parametrize("frozen", ["q_proj", "o_proj", "layernorm", "up_proj", "layers.0", "embed_tokens"])
def test_frozen_parts_get_no_gradient_and_change_no_other(frozen: str) -> None:
    model = model_of(KINDS["qwen2"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    flat = flat_one(model)
    assert_same(model, flat)
    assert all(p.grad is None for name, p in flat.named_parameters() if frozen in name)


def test_gradient_checkpointing(calls: list[int]) -> None:
    model = model_of(KINDS["llama"])
    flat = flat_one(model)
    flat.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    flat.train()
    calls.clear()
    assert_same(model, flat)
    assert len(calls) == 4


def test_other_calls_go_through_the_modules(calls: list[int]) -> None:
    model = model_of(KINDS["llama"])
    flat = flat_one(model)
    calls.clear()
    assert_same(model, flat, lengths=[17], prefixes=[(0, 0)])  # longer than twice the head's dimensions
    run(copy.deepcopy(flat).bfloat16())
    assert not calls
    run(copy.deepcopy(flat))  # a copy is as flat
    assert len(calls) == 2


def test_wrapped_parts_are_called(calls: list[int]) -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = model_of(KINDS["llama"])
    flat = flat_one(model)
    calls.clear()
    for m in (model, flat):
        m.model.layers[1].self_attn.q_proj.__class__ = Wrapped
    assert_same(model, flat)
    assert len(calls) == 1


def test_which_models_have_none() -> None:
    assert flatten_layers(model_of(Qwen3Config(**SIZES))) == 0  # norms of heads
    assert flatten_layers(model_of(LlamaConfig(**SIZES)).bfloat16()) == 0
    assert flatten_layers(model_of(LlamaConfig(**SIZES | {"hidden_size": 1024, "num_hidden_layers": 1}))) == 0


def test_norms_of_two_kinds_and_layers_of_two_sizes(calls: list[int]) -> None:
    model = model_of(KINDS["qwen2"])
    for layer in model.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 0.5
    other = copy.deepcopy(model.config)
    other.num_key_value_heads = 1
    model.model.layers[1].self_attn = type(model.model.layers[1].self_attn)(other, 1)
    flat = flat_one(model)
    calls.clear()
    assert_same(model, flat)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    ],
)
def test_frequencies_that_follow_the_longest_row_are_left_to_the_modules(rope: dict[str, Any]) -> None:
    more = {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
    config = LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=rope | more)
    assert flatten_layers(model_of(config)) == 0


def test_the_rotary_module_serves_other_callers() -> None:
    """Layers that take the pair apart or by index, calls with more arguments, several rows, other types."""
    flat = flat_one(model_of(KINDS["llama"]))
    rotary, x = flat.model.rotary_emb, torch.zeros(1, 3, 16)
    ids = torch.tensor([[0, 4, 2]])
    expected = type(rotary).forward(rotary, x, ids)
    given = rotary(x, ids)
    assert len(given) == 2
    for got in (tuple(given), (given[0], given[1])):
        torch.testing.assert_close(got, expected)

    class Scaling(type(rotary)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor, scale: float = 1.0) -> list[Tensor]:
            return [scale * t for t in super().forward(x, position_ids)]

    rotary.__class__ = Scaling
    torch.testing.assert_close(rotary(x, ids, scale=2.0), [2 * t for t in expected])
    rotary.__class__ = Scaling.__base__
    assert isinstance(rotary(x, ids.repeat(2, 1)), tuple)
    assert isinstance(rotary(x.bfloat16(), ids), tuple)


def test_a_copy_with_other_frequencies_follows_them() -> None:
    model = model_of(KINDS["llama"])
    flat = flat_one(model)
    run(flat)  # its tables are filled
    model, flat = copy.deepcopy(model), copy.deepcopy(flat)
    for m in (model, flat):
        m.zero_grad()
        m.model.rotary_emb.register_buffer("inv_freq", m.model.rotary_emb.inv_freq * 0.5, persistent=False)
    assert_same(model, flat)


def test_hooks_may_change_what_a_layer_gives() -> None:
    model = model_of(KINDS["llama"])
    flat = flat_one(model)
    for m in (model, flat):
        m.model.layers[0].register_forward_hook(lambda module, args, out: out.add_(1))
    assert_same(model, flat)
