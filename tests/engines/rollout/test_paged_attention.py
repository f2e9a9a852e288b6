"""Attention over the paged KV cache against the formula over each whole sequence."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lockstep.engines.rollout.embedded import paged_attention
from lockstep.engines.rollout.embedded.cpu.decode_attention import CpuDecodeAttention
from lockstep.engines.rollout.embedded.paged_attention import (
    CachedRows,
    LayerProbe,
    LayerShape,
    PagedAttention,
    PagedCache,
)
from lockstep.models.attention import AttentionContext
from lockstep.models.layer_options import LayerOptions
from tests.models.attention_reference import naive_attention

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 6, 2, 8, 8
PLAIN = LayerOptions(0.3)
SINKS = torch.linspace(-1, 2, HEADS)
OPTIONS = [
    PLAIN,
    LayerOptions(0.3, 3),
    LayerOptions(0.3, softcap=0.7),
    LayerOptions(0.3, sinks=SINKS),
    LayerOptions(0.3, 3, 0.7, SINKS),
    LayerOptions(0.3, chunk=4),
    LayerOptions(0.3, softcap=0.7, chunk=4),
]
CPU = torch.device("cpu")


def layer(index: int = 0) -> nn.Module:
    module = nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    return module


def attend(context: AttentionContext, at: nn.Module, tensors: list[Tensor], options: LayerOptions) -> Tensor:
    """(T, heads, dim) -> (T, H, value dim)."""
    q, k, v = (t.transpose(0, 1)[None] for t in tensors)
    return context.attend(at, q, k, v, options)[0]


def random_sequence(length: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (KEY_HEADS, VALUE_DIM))
    return [torch.randn(length, *shape, generator=g) for shape in shapes]


def naive(sequence: list[Tensor], options: LayerOptions) -> Tensor:
    q, k, v = sequence
    return naive_attention(q, k, v, options)


def cache_slots(table: list[int], start: int, stop: int, size: int) -> list[int]:
    return [table[p // size] * size + p % size for p in range(start, stop)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1, 4])
def test_prefill_chunk_and_decode_tokens_in_one_step(options: LayerOptions, size: int) -> None:
    """Three sequences of 7, 9 and 5 tokens: after a prefill two of them get one more token and one a chunk of three."""
    cache = PagedCache({2: LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32)}, 40, size, CPU)
    lengths = [7, 9, 5]
    data = [random_sequence(n, seed) for seed, n in enumerate(lengths)]
    expected = [naive(d, options) for d in data]
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[blocks.pop() for _ in range(-(-n // size))] for n in lengths]
    module = layer(2)

    fresh = torch.tensor([s for t, stop in zip(tables, (6, 6, 4)) for s in cache_slots(t, 0, stop, size)])
    context = PagedAttention(cache, fresh, [], fresh_lengths=[6, 6, 4])
    tensors = [torch.cat([d[i][:stop] for d, stop in zip(data, (6, 6, 4))]) for i in range(3)]
    out = attend(context, module, tensors, options)
    torch.testing.assert_close(out, torch.cat([e[:stop] for e, stop in zip(expected, (6, 6, 4))]))

    width = max(len(tables[0]), len(tables[2]))
    padded = [t + [39] * (width - len(t)) for t in (tables[0], tables[2])]
    rows = [
        CachedRows(0, torch.tensor(padded), torch.tensor([[6], [4]])),
        CachedRows(2, torch.tensor([tables[1]]), torch.tensor([[6, 7, 8]])),
    ]
    new = random_sequence(3, seed=9)
    new_table = [blocks.pop() for _ in range(3)]
    parts = [(0, 6, 7), (2, 4, 5), (1, 6, 9)]
    slots = [s for i, a, b in parts for s in cache_slots(tables[i], a, b, size)] + cache_slots(new_table, 0, 3, size)
    context = PagedAttention(cache, torch.tensor(slots), rows, fresh_lengths=[3])
    tensors = [torch.cat([*(data[i][n][a:b] for i, a, b in parts), new[n]]) for n in range(3)]
    out = attend(context, module, tensors, options)
    torch.testing.assert_close(out, torch.cat([*(expected[i][a:b] for i, a, b in parts), naive(new, options)]))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1, 4])
def test_prefill_in_chunks(options: LayerOptions, size: int) -> None:
    cache = PagedCache({0: LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32)}, 20, size, CPU)
    data = random_sequence(11, seed=0)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(0))[: -(-11 // size)].tolist()
    outputs = []
    for start, stop in [(0, 4), (4, 9), (9, 11)]:
        slots = torch.tensor(cache_slots(table, start, stop, size))
        rows = [CachedRows(0, torch.tensor([table]), torch.arange(start, stop)[None])] if start else []
        context = PagedAttention(cache, slots, rows, fresh_lengths=[] if start else [stop])
        outputs.append(attend(context, layer(0), [t[start:stop] for t in data], options))
    torch.testing.assert_close(torch.cat(outputs), naive(data, options))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[5]])
def test_a_long_chunk_attends_in_parts(options: LayerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "MAX_MASK", 2 * HEADS // KEY_HEADS * 12)  # of two queries and three blocks
    test_prefill_in_chunks(options, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_and_decode_on_cuda(options: LayerOptions) -> None:
    """A sequence of 40 tokens: two chunks of prefill, then one decode step beside an unused decode slot."""
    from lockstep.engines.rollout.embedded.cuda.decode_attention import CudaDecodeAttention

    device, size = torch.device("cuda"), 16
    cache = PagedCache({0: LayerShape(KEY_HEADS, 16, 16, torch.float32)}, 20, size, device)
    torch.manual_seed(0)
    data = [torch.randn(40, heads, 16, device=device) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    options = replace(options, sinks=None if options.sinks is None else options.sinks.to(device))
    table = [7, 3, 5]
    outputs = []
    for start, stop in [(0, 20), (20, 39)]:
        slots = torch.tensor(cache_slots(table, start, stop, size), device=device)
        positions = torch.arange(start, stop, device=device)[None]
        rows = [CachedRows(0, torch.tensor([table], device=device), positions)] if start else []
        context = PagedAttention(cache, slots, rows, fresh_lengths=[] if start else [stop])
        outputs.append(attend(context, layer(0), [t[start:stop] for t in data], options))
    decode = CudaDecodeAttention(
        cache.addresses().to(device),
        size,
        torch.tensor([[0, 0, 0], table], dtype=torch.int32, device=device),
        torch.tensor([1, 0], dtype=torch.int32, device=device),
        torch.tensor([39, 0], device=device),
        torch.tensor([*cache_slots(table, 39, 40, size), -1], device=device),
        max_splits=2,
        fp8=False,
    )
    outputs.append(attend(decode, layer(0), [t[[39, 0]] for t in data], options)[:1])
    torch.testing.assert_close(torch.cat(outputs), naive(data, options), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1, 4])
def test_decode_steps_on_the_cpu(options: LayerOptions, size: int) -> None:
    """Rows of 3 and 30 tokens, which are not padded together, decode two or four more; the cache then holds them all."""
    cache = PagedCache({2: LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32)}, 60, size, CPU)
    starts, num_steps = [3, 2, 30], 4
    data = [random_sequence(n + num_steps, seed) for seed, n in enumerate(starts)]
    expected = [naive(d, options) for d in data]
    blocks = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[blocks.pop() for _ in range(-(-(n + num_steps) // size))] for n in starts]
    module = layer(2)
    fresh = torch.tensor([s for t, n in zip(tables, starts) for s in cache_slots(t, 0, n, size)])
    tensors = [torch.cat([d[i][:n] for d, n in zip(data, starts)]) for i in range(3)]
    attend(PagedAttention(cache, fresh, [], fresh_lengths=starts), module, tensors, options)

    steps = torch.arange(num_steps)[:, None]
    positions = torch.tensor(starts) + torch.minimum(steps, torch.tensor([1, 3, 3]))  # the first stops after two steps
    context = CpuDecodeAttention(cache, tables, positions)
    for step, at in enumerate(positions.tolist()):
        context.begin()
        tensors = [torch.stack([d[i][p] for d, p in zip(data, at)]) for i in range(3)]
        out = attend(context, module, tensors, options)
        running = slice(1 if step >= 2 else 0, None)
        torch.testing.assert_close(out[running], torch.stack([e[p] for e, p in zip(expected, at)])[running])
    context.write_back()
    for (_, keys, values), table, start, count in zip(data, tables, starts, (2, 4, 4)):
        for store, tokens in ((cache.keys[2], keys), (cache.values[2], values)):
            cached = store.view(60, KEY_HEADS, size, -1).transpose(1, 2)[table].flatten(0, 1)
            torch.testing.assert_close(cached[: start + count], tokens[: start + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_blocks_are_copied_and_kept_when_the_cache_grows(dtype: torch.dtype) -> None:
    shape = LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, dtype)
    cache = PagedCache({0: shape, 1: shape}, 4, 2, CPU)
    for index in (0, 1):
        for store in (cache.keys[index], cache.values[index]):
            store.copy_(torch.randn(store.shape))
    before = [t.clone().float().view(4, KEY_HEADS, 2, -1) for t in (cache.keys[1], cache.values[1])]
    cache.copy_blocks([(0, 2), (2, 3)])  # block 3 gets the old content of block 2
    cache.grow(7)
    assert cache.keys[1].dtype == cache.values[1].dtype == dtype
    for old, store in zip(before, (cache.keys[1], cache.values[1])):
        new = store.float().view(7, KEY_HEADS, 2, -1)
        assert torch.equal(new[:4], old[[0, 1, 0, 2]])
        assert (new[4:] == 0).all()


def test_the_probe_records_shapes_and_refuses_a_second_layer_of_the_same_index() -> None:
    probe = LayerProbe()
    q, k, v = (t.transpose(0, 1)[None] for t in random_sequence(1, 0))
    out = probe.attend(layer(4), q, k, v, LayerOptions(0.3, 5))
    assert out.shape == (1, 1, HEADS, VALUE_DIM)
    shape = LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM, torch.float32, 5)
    assert probe.layers == {4: shape} and shape.bytes_per_token == 2 * (8 + 8) * 4
    with pytest.raises(ValueError, match="layer_idx"):
        probe.attend(layer(4), q, k, v, PLAIN)
