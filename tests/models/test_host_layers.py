"""The CPU's forwards of norms and rotary embeddings give what transformers gives, and the same gradients."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lockstep.models.host_layers import fuse_on_host

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
USUAL = [LlamaConfig, Qwen2Config, Qwen3Config, GemmaConfig]


def model_of(kind: type[PretrainedConfig], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES), attn_implementation="sdpa")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


@pytest.mark.parametrize("kind", [*USUAL, Gemma2Config])
def test_results_and_gradients_are_those_of_transformers(kind: type[PretrainedConfig]) -> None:
    model = model_of(kind)
    fused = copy.deepcopy(model)
    classes = fuse_on_host(fused)
    assert all(any(part in name for name in classes) for part in ("Norm", "Attention", "MLP"))
    ids = torch.randint(0, 64, (2, 9))
    logits = [m(input_ids=ids, use_cache=False).logits for m in (model, fused)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(logits[0])
    for value in logits:
        (value * weights).sum().backward()
    for (name, one), other in zip(model.named_parameters(), fused.parameters()):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("frozen", ["gate_proj", "down_proj", "mlp"])
def test_frozen_parts_of_an_mlp_get_no_gradient_and_change_no_other(frozen: str) -> None:
    models = [model_of(USUAL[0])]
    for name, parameter in models[0].named_parameters():
        parameter.requires_grad_(frozen not in name)
    models.append(copy.deepcopy(models[0]))
    fuse_on_host(models[1])
    for model in models:
        model(input_ids=torch.arange(6)[None], use_cache=False).logits.square().sum().backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
        assert (one.grad is None) == (other.grad is None) == (frozen in name)
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("kind", USUAL)
def test_in_half_precision_the_stream_is_kept_in_float32(kind: type[PretrainedConfig]) -> None:
    model = model_of(kind, torch.bfloat16)
    fused = copy.deepcopy(model)
    fuse_on_host(fused)
    streams: list[torch.dtype] = []
    fused.model.layers[1].register_forward_pre_hook(lambda module, args: streams.append(args[0].dtype))
    ids = torch.randint(0, 64, (2, 9))
    exact = copy.deepcopy(model).float()(input_ids=ids, use_cache=False).logits
    plain, wide = (m(input_ids=ids, use_cache=False).logits for m in (model, fused))
    assert streams == [torch.float32] and wide.dtype == torch.bfloat16
    assert (wide - exact).abs().mean() < (plain - exact).abs().mean()


def test_a_copy_computes_with_its_own_weights() -> None:
    model = model_of(LlamaConfig)
    fuse_on_host(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    ids = torch.randint(0, 64, (1, 5))
    assert not other(input_ids=ids).logits.any() and model(input_ids=ids).logits.any()
