"""Latent attention (MLA): the absorbed form is the expanded one, with and without a LoRA adapter."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lockstep.models.attention_variants import install_attention_variants
from lockstep.models.key_index import KeyIndex
from lockstep.models.latent_attention import LATENT_LAYERS, LatentKeys, can_absorb
from tests.models import architectures

OWN_MASK = {"Glm5NextTextAttention"}
"""Builds its own attention mask, and is not computed on packed tokens."""


def latent_layer(adapter: bool) -> Any:
    """Of DeepSeek-V3 in float64, with 4 heads."""
    model = architectures.tiny_model("deepseek_v3").double()
    layer: Any = model.model.layers[0].self_attn
    if adapter:
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=5, target_modules=["kv_b_proj"]), layer)
        nn.init.normal_(layer.kv_b_proj.lora_B["default"].weight)
        layer.double()
    return layer


@pytest.mark.parametrize("adapter", [False, True])
@torch.no_grad()
def test_the_absorbed_form_equals_the_expanded_one(adapter: bool) -> None:
    torch.manual_seed(0)
    layer = latent_layer(adapter)
    num_rows, num_tokens = 2, 5
    keys = LatentKeys(
        layer,
        torch.randn(num_rows, 1, num_tokens, layer.kv_lora_rank).double(),
        torch.randn(num_rows, 1, num_tokens, layer.qk_rope_head_dim).double(),
    )
    query = torch.randn(num_rows, layer.num_heads, num_tokens, layer.qk_head_dim).double()
    expanded_keys, values = keys.expand()
    joined, none = keys.join(None)
    assert joined.shape == (num_rows, 1, num_tokens, layer.kv_lora_rank + layer.qk_rope_head_dim) and none.numel() == 0
    scores = query @ expanded_keys.mT
    torch.testing.assert_close(keys.absorb(query) @ joined.mT, scores)
    mixed = scores.softmax(-1) @ joined  # (B, H, T, R + DR)
    torch.testing.assert_close(keys.project(mixed.transpose(1, 2)), (scores.softmax(-1) @ values).transpose(1, 2))
    if adapter:
        layer.kv_b_proj._disable_adapters = True
        assert not torch.allclose(keys.absorb(query) @ joined.mT, scores)
        torch.testing.assert_close(keys.absorb(query) @ joined.mT, query @ keys.expand()[0].mT)


def test_keys_of_an_index_are_cached_beside_the_latents() -> None:
    keys = LatentKeys(None, torch.randn(1, 1, 4, 6), torch.randn(1, 1, 4, 2))
    index = KeyIndex(torch.randn(1, 4, 3, 5), torch.rand(1, 4, 3), 2, torch.randn(1, 4, 5))
    latents, scored = index.split_keys(keys.join(index)[0], 8)
    assert torch.equal(latents, torch.cat((keys.latent, keys.rope), -1))
    assert index.keys is not None and torch.equal(scored, index.keys)
    later = keys.from_token(3)
    assert torch.equal(later.join(index.tokens(slice(3, None)))[0], keys.join(index)[0][:, :, 3:])


def test_other_layers_than_linear_ones_are_not_absorbed() -> None:
    class Quantized(nn.Linear):
        pass

    assert can_absorb(nn.Linear(4, 8, bias=False))
    assert not can_absorb(nn.Linear(4, 8)) and not can_absorb(Quantized(4, 8, bias=False))


def test_transformers_own_attention_gets_expanded_keys() -> None:
    model = architectures.tiny_model("deepseek_v3")
    install_attention_variants(model)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        expected = architectures.tiny_model("deepseek_v3")(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)


def test_the_table_has_every_class_of_transformers() -> None:
    found = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for part in path.read_text().split("\nclass ")[1:]:
            if "def expand_kv(" in part:
                found |= set(re.findall(r"^\w+", part))
    assert found - OWN_MASK <= LATENT_LAYERS
