"""Which modules get faster forwards, and that a model computes the same with them."""

import copy
import os

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3MLP, Gemma3RMSNorm, Gemma3TextConfig
from transformers.models.granite.modeling_granite import GraniteConfig, GraniteDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm

from lockstep.models.attention import ATTENTION_NAME, PackedAttention, no_mask
from lockstep.models.fused_layers import fuse, gate_activation, is_usual_layer, norm_offset, rotates_halves

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "pad_token_id": 0}


ARCHITECTURES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": {"layer_types": ["full_attention"] * 2},
    "phi3": {},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "granite": {"residual_multiplier": 0.5},
    "olmo2": {},
    "glm": {},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """A CUDA device, or the host with Triton's interpreter in its place."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    monkeypatch.setattr("lockstep.models.fused_layers._is_served", lambda tensor: True)
    return "cpu"


def tiny_model(architecture: str = "qwen2", dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[architecture](**SHAPE, **ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
    return model.to(device).train()


def values_and_gradients(model: nn.Module, device: str) -> list[torch.Tensor]:
    """Hidden states of two packed sequences, and the gradients of a weighted sum of them."""
    ids = torch.arange(16, device=device)[None]
    decoder = model.get_decoder()  # type: ignore[operator]
    out = decoder(
        input_ids=ids,
        position_ids=torch.cat((torch.arange(7), torch.arange(9)))[None].to(device),
        attention_mask=no_mask(ids.device),
        use_cache=False,
        lockstep_context=PackedAttention([7, 9], torch.device(device)),
    ).last_hidden_state
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (out.float() * weights).sum().backward()
    return [out.detach().float(), *(p.grad.float() for p in decoder.parameters() if p.grad is not None)]


def check_equal(got: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert float((a - b).norm() / b.norm().clamp_min(1e-4)) < bound


class _Doubling(Qwen2RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


def test_norms_are_told_apart_by_what_they_compute() -> None:
    assert norm_offset(Qwen2RMSNorm(16)) is False
    assert norm_offset(Gemma3RMSNorm(16)) is True
    assert norm_offset(Olmo2RMSNorm(16)) is None  # rounds once, after the weight
    assert norm_offset(_Doubling(16)) is None
    assert norm_offset(nn.LayerNorm(16)) is None
    assert norm_offset(nn.Linear(16, 16, bias=False)) is None


class _Sum(Qwen2MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def test_gated_layers_are_told_apart_by_what_they_compute() -> None:
    config = Qwen2Config(**SHAPE)
    assert gate_activation(Qwen2MLP(config)) == "silu"
    assert gate_activation(Gemma3MLP(Gemma3TextConfig(**SHAPE))) == "gelu_tanh"
    assert gate_activation(Phi3MLP(Phi3Config(**SHAPE))) == "silu"
    assert gate_activation(Qwen2MLP(Qwen2Config(**SHAPE, hidden_act="gelu"))) is None
    assert gate_activation(_Sum(config)) is None
    assert gate_activation(nn.Linear(3, 3)) is None


def test_rotary_functions_are_told_apart_by_what_they_compute() -> None:
    def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        return [x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin for x in (q, k)]

    assert rotates_halves(modeling_qwen2.apply_rotary_pos_emb)
    assert not rotates_halves(interleaved)
    assert not rotates_halves(lambda q: (q, q))


def test_layers_are_told_apart_by_what_they_compute() -> None:
    assert is_usual_layer(Qwen2DecoderLayer(Qwen2Config(**SHAPE), 0))
    assert is_usual_layer(MixtralDecoderLayer(MixtralConfig(**SHAPE), 0))
    assert not is_usual_layer(GraniteDecoderLayer(GraniteConfig(**SHAPE, residual_multiplier=0.5), 0))
    assert not is_usual_layer(Gemma3DecoderLayer(Gemma3TextConfig(**SHAPE), 0))  # norms after attention and MLP too
    assert not is_usual_layer(nn.Linear(3, 3))


def test_nothing_happens_on_the_host() -> None:
    model = tiny_model()
    assert fuse(model) == []
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_computes_the_same(architecture: str, dtype: torch.dtype, device: str) -> None:
    plain = tiny_model(architecture, dtype, device)
    model = copy.deepcopy(plain)
    assert fuse(model)
    assert fuse(model) == []
    copied = copy.deepcopy(model)  # before its gradients
    expected = values_and_gradients(plain, device)
    for one in (model, copied):
        check_equal(values_and_gradients(one, device), expected, 1e-5 if dtype == torch.float32 else 6e-2)


@pytest.mark.gpu
def test_what_is_fused(device: str) -> None:
    joined = "Qwen2Attention (q_proj, k_proj, v_proj)"
    fused = ["Qwen2Attention", joined, "Qwen2DecoderLayer", "Qwen2MLP", "Qwen2RMSNorm"]
    assert fuse(tiny_model(device=device)) == fused


@pytest.mark.gpu
def test_checkpointed_layers_compute_the_same(device: str) -> None:
    plain = tiny_model(device=device)
    model = copy.deepcopy(plain)
    fuse(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    check_equal(values_and_gradients(model, device), values_and_gradients(plain, device), 1e-5)


@pytest.mark.gpu
def test_a_wrapped_layer_is_still_called(device: str) -> None:
    plain = tiny_model(device=device)
    model = copy.deepcopy(plain)
    fuse(model)
    for layer in model.get_decoder().layers:  # type: ignore[operator]
        layer.mlp.down_proj = _Halved(layer.mlp.down_proj)
        layer.self_attn.o_proj = _Halved(layer.self_attn.o_proj)
        layer.self_attn.q_proj = _Halved(layer.self_attn.q_proj)
    for layer in plain.get_decoder().layers:  # type: ignore[operator]
        for linear in (layer.mlp.down_proj, layer.self_attn.o_proj, layer.self_attn.q_proj):
            for parameter in linear.parameters():
                parameter.data /= 2
    got, expected = (values_and_gradients(one, device)[0] for one in (model, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


class _Halved(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / 2
