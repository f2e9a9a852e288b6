"""Decode steps on CUDA from cached latents: the attention of expanded keys and values."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.engines.rollout.embedded.cuda.decode_attention import CudaDecodeAttention  # noqa: E402
from lockstep.engines.rollout.embedded.model_runner import ModelRunner  # noqa: E402
from lockstep.engines.rollout.embedded.paged_attention import LayerShape, PagedAttention, PagedCache  # noqa: E402
from lockstep.models.attention import ATTENTION_NAME  # noqa: E402
from lockstep.models.key_index import KeyIndex  # noqa: E402
from lockstep.models.known_models import install_decoder_layers  # noqa: E402
from lockstep.models.latent_attention import LatentKeys  # noqa: E402
from lockstep.models.layer_options import LayerOptions  # noqa: E402
from tests.models import architectures  # noqa: E402
from tests.models.attention_reference import naive_attention  # noqa: E402

pytestmark = pytest.mark.gpu
SIZE = 4
LENGTHS = [3, 9, 70]
OPTIONS = [LayerOptions(0.2), LayerOptions(0.2, softcap=2.0), LayerOptions(0.2, sliding_window=7)]
PLAIN = [(options, None) for options in OPTIONS]
INDEXED = [(OPTIONS[0], 6), (OPTIONS[0], 200)]
"""And how many keys an index picks: some, and more than a table has positions."""


class Sequences:
    """Queries and latents of all tokens of some sequences in one layer of DeepSeek-V3, with an index if `topk` is given."""

    def __init__(self, topk: int | None = None) -> None:
        torch.manual_seed(0)
        model: Any = architectures.tiny_model("deepseek_v3")
        self.layer: Any = model.model.layers[1].self_attn.to(DEVICE)
        layer, num_tokens = self.layer, sum(LENGTHS)
        self.query = torch.randn(1, layer.num_heads, num_tokens, layer.qk_head_dim, device=DEVICE)
        self.latent = torch.randn(1, 1, num_tokens, layer.kv_lora_rank, device=DEVICE)
        self.rope = torch.randn(1, 1, num_tokens, layer.qk_rope_head_dim, device=DEVICE)
        self.dim = layer.kv_lora_rank + layer.qk_rope_head_dim
        self.index: KeyIndex | None = None
        if topk is not None:
            queries = torch.randn(1, num_tokens, 16, 12, device=DEVICE)
            keys = torch.randn(1, num_tokens, 12, device=DEVICE)
            self.index = KeyIndex(queries, torch.randn(1, num_tokens, 16, device=DEVICE), topk, keys)
            self.dim += 12
        self.starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
        blocks = torch.randperm(40).tolist()
        self.blocks = [[blocks.pop() for _ in range(-(-n // SIZE))] for n in LENGTHS]

    def keys(self, tokens: list[int]) -> LatentKeys:
        return LatentKeys(self.layer, self.latent[:, :, tokens], self.rope[:, :, tokens])

    def options(self, options: LayerOptions, tokens: list[int]) -> LayerOptions:
        return options if self.index is None else replace(options, index=self.index.tokens(tokens))

    def slots(self, sequence: int, positions: range) -> list[int]:
        return [self.blocks[sequence][p // SIZE] * SIZE + p % SIZE for p in positions]

    @torch.no_grad()
    def prefilled(self, num_left: int) -> PagedCache:
        """A cache with all tokens but the last of each sequence."""
        cache = PagedCache({1: LayerShape(1, self.dim, 0, torch.float32)}, 40, SIZE, DEVICE)
        lengths = [n - num_left for n in LENGTHS]
        tokens = [start + p for start, n in zip(self.starts, lengths) for p in range(n)]
        slots = [slot for sequence, n in enumerate(lengths) for slot in self.slots(sequence, range(n))]
        context = PagedAttention(cache, torch.tensor(slots, device=DEVICE), [], lengths)
        out = context.attend_latent(
            self.layer, self.query[:, :, tokens], self.keys(tokens), self.options(OPTIONS[0], tokens)
        )
        first = 0
        for expected in self.expected(OPTIONS[0]):
            count = len(expected) - num_left
            torch.testing.assert_close(out[0, first : first + count], expected[:count], atol=1e-5, rtol=1e-5)
            first += count
        return cache

    @torch.no_grad()
    def decode(self, cache: PagedCache, rows: list[tuple[int, int]], options: LayerOptions, grouped: bool) -> Tensor:
        """rows: sequence and position of the new tokens, beside an idle row -> (T, H, DV)."""
        tables = torch.zeros(len(LENGTHS) + 1, 20, dtype=torch.int32)
        for sequence, blocks in enumerate(self.blocks):
            tables[sequence, : len(blocks)] = torch.tensor(blocks)
        slots = [slot for sequence, p in rows for slot in self.slots(sequence, range(p, p + 1))]
        groups = [*range(0, len(rows) + 1, 2), len(rows) + 1]
        context = CudaDecodeAttention(
            cache.addresses().to(DEVICE),
            SIZE,
            tables.to(DEVICE),
            torch.tensor([*(sequence for sequence, _ in rows), len(LENGTHS)], dtype=torch.int32, device=DEVICE),
            torch.tensor([*(p for _, p in rows), 0], device=DEVICE),
            torch.tensor([*slots, -1], device=DEVICE),
            max_splits=2,
            fp8=False,
            group_starts=torch.tensor(groups, device=DEVICE) if grouped else None,
        )
        tokens = [*(self.starts[sequence] + p for sequence, p in rows), 0]
        out = context.attend_latent(
            self.layer, self.query[:, :, tokens], self.keys(tokens), self.options(options, tokens)
        )
        assert out.shape == (1, len(tokens), self.layer.num_heads, self.layer.v_head_dim)
        return out[0, :-1]

    @torch.no_grad()
    def expected(self, options: LayerOptions) -> list[Tensor]:
        """(T, H, DV) of all tokens of each sequence."""
        key, value = self.keys(list(range(sum(LENGTHS)))).expand()
        parts = (t[0].transpose(0, 1).split(LENGTHS) for t in (self.query, key, value))
        if self.index is None:
            return [naive_attention(q, k, v, options) for q, k, v in zip(*parts)]
        outputs = []
        for start, q, k, v in zip(self.starts, *parts):
            index = self.index.tokens(slice(start, start + len(q)))
            assert index.keys is not None
            places = torch.arange(len(q), device=DEVICE)
            unpicked = index.hide_others(index.keys, options.hides(places[:, None], places)[None])
            scores = torch.einsum("qhd,khd->hqk", q, k) * options.scaling
            probs = scores.masked_fill(unpicked, -math.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", probs, v))
        return outputs


@pytest.mark.parametrize(("options", "topk"), [*PLAIN, *INDEXED])
def test_steps_equal_expanded_attention(options: LayerOptions, topk: int | None) -> None:
    sequences = Sequences(topk)
    cache = sequences.prefilled(num_left=2)
    expected = sequences.expected(options)
    for left in (2, 1):
        rows = [(sequence, n - left) for sequence, n in enumerate(LENGTHS)]
        out = sequences.decode(cache, rows, options, grouped=False)
        torch.testing.assert_close(out, torch.stack([e[-left] for e in expected]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("options", "topk"), [*PLAIN, *INDEXED])
def test_tokens_of_one_step_see_each_other(options: LayerOptions, topk: int | None) -> None:
    """As drafts do."""
    sequences = Sequences(topk)
    cache = sequences.prefilled(num_left=2)
    expected = sequences.expected(options)
    rows = [(sequence, n - left) for sequence, n in enumerate(LENGTHS) for left in (2, 1)]
    out = sequences.decode(cache, rows, options, grouped=True)
    torch.testing.assert_close(out, torch.cat([e[-2:] for e in expected]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
@torch.no_grad()
def test_a_model_decodes_as_transformers_computes(model_type: str) -> None:
    """A prompt of 5 tokens, then a step per token, beside an idle row."""
    model: Any = architectures.tiny_model(model_type).to(DEVICE)
    install_decoder_layers(model)
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (1, 12), device=DEVICE)
    expected = model(ids, use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    runner = ModelRunner(model, SIZE)
    assert runner.allocate(8) is None and runner.cache is not None
    blocks = [5, 2, 7]
    slots = torch.tensor([blocks[p // SIZE] * SIZE + p % SIZE for p in range(12)], device=DEVICE)
    positions = torch.arange(12, device=DEVICE)
    prefill = PagedAttention(runner.cache, slots[:5], [], [5])
    logits = [runner.logits(runner.forward(ids[:, :5], positions[None, :5], prefill))]
    for p in range(5, 12):
        context = CudaDecodeAttention(
            runner.cache.addresses().to(DEVICE),
            SIZE,
            torch.tensor([[0, 0, 0], blocks], dtype=torch.int32, device=DEVICE),
            torch.tensor([1, 0], dtype=torch.int32, device=DEVICE),
            torch.stack([positions[p], positions[0]]),
            torch.stack([slots[p], torch.full_like(slots[p], -1)]),
            max_splits=2,
            fp8=False,
        )
        tokens = torch.stack([ids[:, p], ids[:, 0]], 1)
        logits.append(runner.logits(runner.forward(tokens, context.positions[None], context))[:1])
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)
