"""Which modules get faster forwards, and that a model computes the same with them."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm, Gemma3TextConfig
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2MLP, Qwen2RMSNorm

from lockstep.models.attention import ATTENTION_NAME, PackedAttention, no_mask
from lockstep.models.fused_layers import fuse, gate_activation, norm_offset, rotates_halves

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0}


def tiny_model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE), dtype=dtype, attn_implementation=ATTENTION_NAME)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
    return model.to(device)


def hidden_states(model: nn.Module, device: str) -> torch.Tensor:
    context = PackedAttention([7, 9], torch.device(device))
    ids = torch.arange(16, device=device)[None]
    position_ids = torch.cat((torch.arange(7), torch.arange(9)))[None].to(device)
    out = model.get_decoder()(  # type: ignore[operator]
        input_ids=ids,
        position_ids=position_ids,
        attention_mask=no_mask(ids.device),
        use_cache=False,
        lockstep_context=context,
    )
    return out.last_hidden_state


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


def test_nothing_happens_on_the_host() -> None:
    model = tiny_model()
    assert fuse(model) == []
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_computes_the_same(dtype: torch.dtype, checkpointing: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    plain = tiny_model(dtype, "cuda").train()
    model = copy.deepcopy(plain)
    assert fuse(model) == ["Qwen2Attention", "Qwen2MLP", "Qwen2RMSNorm"]
    assert fuse(model) == []
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    weights = torch.randn(1, 16, 32, device="cuda")
    values = []
    for one in (plain, model, copy.deepcopy(model)):
        out = hidden_states(one, "cuda").float()
        (out * weights).sum().backward()
        values.append([out.detach(), *(p.grad.float() for p in one.get_decoder().parameters())])  # type: ignore[operator]
    for other in values[1:]:
        for a, b in zip(values[0], other):
            assert float((a - b).norm() / a.norm().clamp_min(1e-6)) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
def test_a_wrapped_layer_is_still_called() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    mlp = Qwen2MLP(Qwen2Config(**SHAPE)).cuda()
    fuse(mlp)
    x = torch.randn(1, 5, 32, device="cuda")
    before = mlp(x)
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Identity())
    torch.testing.assert_close(mlp(x), before)
