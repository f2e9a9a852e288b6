"""Chunked and indexed attention on packed tokens, against the formula of one sequence at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.models import attention, attention_variants
from lockstep.models.attention import PackedAttention
from lockstep.models.key_index import KeyIndex
from lockstep.models.layer_options import LayerOptions
from lockstep.models.model_check import check_causal
from tests.models.architectures import VARIANTS, save_tiny_model, support, tiny_model
from tests.models.attention_reference import naive_attention
from tests.models.test_packed_attention import CPU, PACKS, NaivePack, assert_close


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_packed_sequences_in_chunks(pack: Any, softcap: float | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, sum(pack[0]), 8) for heads in (4, 2, 2)]
    got = with_gradients(PackedAttention(pack[0], CPU, pack[1]), tensors, LayerOptions(0.4, None, softcap, chunk=3))
    exact = with_gradients(NaivePack(*pack), [t.double() for t in tensors], LayerOptions(0.4, None, softcap, chunk=3))
    assert_close(got, exact)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.1, -1.0, 2.0, 0.5])])
def test_the_index_picks_among_the_keys_of_the_own_sequence(pack: Any, sinks: Tensor | None) -> None:
    torch.manual_seed(0)
    num_tokens = sum(pack[0])
    query, key, value = (torch.randn(1, heads, num_tokens, 8) for heads in (4, 2, 2))
    index = KeyIndex(torch.randn(1, num_tokens, 3, 5), torch.rand(1, num_tokens, 3), 4, torch.randn(1, num_tokens, 5))
    options = LayerOptions(0.4, sinks=sinks, index=index)
    got = PackedAttention(pack[0], CPU, pack[1]).attend(nn.Identity(), query, index.join_keys(key), value, options)[0]
    assert index.keys is not None
    start = 0
    for length, (prefix, before) in zip(pack[0], pack[1] or [(0, 0)] * len(pack[0])):
        tokens = [*range(prefix, prefix + before), *range(start, start + length)]
        for place in range(length):
            seen = tokens[: before + place + 1]
            at = start + place
            products = torch.relu(index.queries[0, at] @ index.keys[0, seen].T)  # (HI, K)
            best = (index.weights[0, at] @ products).topk(min(4, len(seen))).indices.sort().values
            chosen = [seen[i] for i in best.tolist()]
            q, k, v = query[0, :, at, None], key[0][:, chosen], value[0][:, chosen]
            expected = naive_attention(*(t.transpose(0, 1) for t in (q, k, v)), LayerOptions(0.4, sinks=sinks))[0]
            torch.testing.assert_close(got[at], expected)
        start += length


@pytest.mark.parametrize("error", ["no chunk", "no scale", "no index"])
def test_planted_errors_are_found_at_load(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if error == "no chunk":
        monkeypatch.setattr(attention, "_extent_in_config", lambda module: (None, None))
    elif error == "no scale":
        monkeypatch.setattr(attention_variants._ScaleByPosition, "__call__", lambda *arguments: None)
    else:
        monkeypatch.setattr(KeyIndex, "hide_others", lambda index, keys, hidden: hidden)
    variant = "glm_moe_dsa, a shared index" if error == "no index" else "llama4, short chunks and scales"
    model_type, changes = VARIANTS[variant]
    save_tiny_model(model_type, tmp_path, **changes)
    assert "differently from transformers" in support(tmp_path).refusals["training"]


def with_gradients(context: Any, tensors: list[Tensor], options: LayerOptions) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = context.attend(nn.Identity(), *leaves, options)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_ties_of_an_index_with_few_heads_are_named() -> None:
    """Keys that every head scores 0 tie: what transformers computes changes with the length of the row."""
    row = list(range(3, 19))
    with pytest.raises(ValueError, match=r"index_n_heads=2, keys tie .* set index_n_heads to 8 or more"):
        check_causal(tiny_model("deepseek_v32", index_n_heads=2), row)
    check_causal(tiny_model("deepseek_v32", index_n_heads=8), row)
