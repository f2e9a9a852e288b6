"""Our decoder layer: the same numbers as the layer it replaces, with its parameters under the same names."""

import copy
import importlib

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.models.attention import ATTENTION_NAME, PackedAttention, no_mask
from lockstep.models.decoder_layer import DecoderLayer, FinalNorm
from lockstep.models.known_models import KNOWN_LAYERS, computes_packed, install_decoder_layers, why_own_forward
from lockstep.models.model_check import transformers_forward
from tests.models.architectures import MODEL_TYPES, SKIPPED, tiny_config as tiny_config_of, tiny_model
from tests.models.vision_families import FAMILIES
from tests.tiny import tiny_config

CPU = torch.device("cpu")


def model_of(kind: str = "qwen3", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval()


def run(model: nn.Module) -> Tensor:
    """Logits of two packed sequences."""
    ids = torch.arange(3, 19)[None]
    out: Tensor = model(
        input_ids=ids,
        position_ids=torch.cat((torch.arange(7), torch.arange(9)))[None],
        attention_mask=no_mask(CPU),
        use_cache=False,
        lockstep_context=PackedAttention([7, 9], CPU),
    ).logits
    return out


def test_every_row_of_the_table_is_walked() -> None:
    """`test_architectures.py` and `test_vision.py` compare values, gradients and decoding of each type with transformers."""
    walked: set[str] = set()
    configs = [tiny_config_of(kind) for kind in set(MODEL_TYPES) - set(SKIPPED)]
    for config in [*configs, *(AutoConfig.for_model(name) for name in FAMILIES)]:
        if why_own_forward(config) is None:
            module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
            walked |= {name for name in vars(module) if name in KNOWN_LAYERS}
    assert walked == set(KNOWN_LAYERS)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_values_and_gradients_equal_the_replaced_layers(kind: str) -> None:
    plain = model_of(kind)
    model = copy.deepcopy(plain)
    assert install_decoder_layers(model)
    weights = torch.randn(1, 16, 259, generator=torch.Generator().manual_seed(1))
    for one in (plain, model):
        (run(one) * weights).sum().backward()
    torch.testing.assert_close(run(model), run(plain), atol=1e-5, rtol=1e-5)
    expected = dict(plain.named_parameters())
    got = dict(model.named_parameters())
    assert got.keys() == expected.keys()
    for name, parameter in got.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-3)


def test_copies_share_children_with_their_reference() -> None:
    model = model_of()
    install_decoder_layers(model)
    copied = copy.deepcopy(model)
    layer = copied.get_decoder().layers[0]  # type: ignore[operator]
    assert isinstance(layer, DecoderLayer) and isinstance(copied.get_decoder().norm, FinalNorm)  # type: ignore[operator]
    assert layer.reference.self_attn is layer.self_attn
    assert layer.self_attn is not model.get_decoder().layers[0].self_attn  # type: ignore[operator]
    with torch.no_grad():
        layer.self_attn.q_proj.weight.mul_(3)
        copied.get_decoder().norm.weight.mul_(2)  # type: ignore[operator]
        ours = run(copied)
        with transformers_forward(copied):  # type: ignore[arg-type]
            ids = torch.arange(3, 10)[None]
            theirs = copied(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours[:, :7], theirs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, run(model))


class Halved(nn.Module):
    """Stands for an adapter around a linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) / 2
        return out


def test_wrapped_linears_keep_their_forward() -> None:
    plain = model_of("llama")
    model = copy.deepcopy(plain)
    install_decoder_layers(model)
    for layer in model.get_decoder().layers:  # type: ignore[operator]
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            setattr(owner, name, Halved(getattr(owner, name)))
    for layer in plain.get_decoder().layers:  # type: ignore[operator]
        for linear in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data /= 2
    torch.testing.assert_close(run(model), run(plain), atol=1e-5, rtol=1e-5)


def test_the_stream_is_float32_beside_half_precision() -> None:
    model = model_of(dtype=torch.bfloat16)
    install_decoder_layers(model)
    dtypes = []
    for layer in model.get_decoder().layers:  # type: ignore[operator]
        layer.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    assert run(model).dtype == torch.bfloat16
    assert dtypes == [torch.float32] * 2


def test_layers_that_are_not_known_stay() -> None:
    model = tiny_model("apertus")
    assert not install_decoder_layers(model)
    assert not any(isinstance(module, DecoderLayer) for module in model.modules())
    assert not computes_packed(model)  # it was made with eager attention


def test_a_second_call_changes_nothing() -> None:
    model = model_of()
    install_decoder_layers(model)
    layers = list(model.get_decoder().layers)  # type: ignore[operator]
    assert install_decoder_layers(model)
    assert all(a is b for a, b in zip(layers, model.get_decoder().layers))  # type: ignore[operator]
