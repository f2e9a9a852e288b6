"""Decode attention over a paged cache against the formula over each row's tokens."""

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels import fp8  # noqa: E402
from lockstep.kernels.paged_decode import decode_attention, write_to_cache  # noqa: E402
from lockstep.models.layer_options import LayerOptions  # noqa: E402
from tests.models.attention_reference import naive_attention  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
BLOCKS = 80


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (20, None), (None, 48)])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, None), (None, 1.0), (2.0, 1.0), (None, 50.0)])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "value_dim", "size"), [(14, 2, 64, 64, 16), (4, 4, 80, 80, 4), (6, 1, 24, 16, 1)]
)
def test_rows_equal_the_formula(
    dtype: torch.dtype,
    splits: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: float | None,
    heads: int,
    key_heads: int,
    dim: int,
    value_dim: int,
    size: int,
) -> None:
    """sinks: about how large they are; large ones must not overflow."""
    torch.manual_seed(3)
    sinks_H = None if sinks is None else (torch.randn(heads, device=DEVICE) + sinks).to(dtype)
    options = LayerOptions(0.3, window, softcap, None if sinks_H is None else sinks_H.double(), chunk)
    lengths = [1, 2, 65, 200] if size == 16 else [1, 17, 60, 2]
    layer = [torch.randn(BLOCKS * 4 * key_heads, size, d, device=DEVICE).to(dtype) for d in (dim, value_dim)]
    order = torch.randperm(BLOCKS * 4)
    tables = torch.zeros(9, 64, dtype=torch.int32)
    slot_ids, cache_slots, expected, news = [3, 0, 7, 5], [], [], []
    used = 0
    for slot_id, length in zip(slot_ids, lengths):
        count = -(-length // size)
        tables[slot_id, :count] = order[used : used + count]
        used += count
        q = torch.randn(heads, dim, device=DEVICE).to(dtype)
        k = torch.randn(length, key_heads, dim, device=DEVICE).to(dtype)
        v = torch.randn(length, key_heads, value_dim, device=DEVICE).to(dtype)
        places = [int(tables[slot_id, p // size]) * size + p % size for p in range(length)]
        at = torch.tensor(places[:-1], dtype=torch.int64, device=DEVICE)
        if length > 1:
            for x, cache in zip((k, v), layer):
                write_to_cache(x[:-1].transpose(0, 1)[None], cache, at, size)
        cache_slots.append(places[-1])
        news.append((q, k[-1], v[-1]))
        expected.append(naive_attention(q.double()[None], k.double(), v.double(), options)[0])
    idle = torch.randn(heads, dim, device=DEVICE).to(dtype), news[0][1], news[0][2]
    query, key, value = (torch.stack(t).transpose(0, 1)[None] for t in zip(*news, idle))
    before = [cache.clone() for cache in layer]
    addresses = torch.tensor([cache.data_ptr() for cache in layer], device=DEVICE)
    out = decode_attention(
        query,
        key,
        value,
        addresses,
        tables.to(DEVICE),
        torch.tensor([*slot_ids, 8], dtype=torch.int32, device=DEVICE),
        torch.tensor([n - 1 for n in lengths] + [0], device=DEVICE),
        torch.tensor([*cache_slots, -1], device=DEVICE),
        scale=0.3,
        window=window,
        chunk=chunk,
        block_size=size,
        splits=splits,
        softcap=softcap,
        sinks=sinks_H,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[0, :-1].double(), torch.stack(expected), atol=tolerance, rtol=tolerance)
    for old, cache, new in zip(before, layer, (key, value)):
        for row, slot in enumerate(cache_slots):
            block = cache.view(-1, key_heads, size, cache.shape[-1])[slot // size, :, slot % size]
            assert torch.equal(block, new[0, :, row])
        assert int((old != cache).any(-1).sum()) <= len(cache_slots) * key_heads  # nothing else was written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("heads", "key_heads", "dim", "value_dim"), [(4, 2, 64, 64), (3, 1, 24, 20)])
def test_a_cache_in_8_bits(
    dtype: torch.dtype, splits: int, heads: int, key_heads: int, dim: int, value_dim: int
) -> None:
    """Keys and values are cut at 448 and rounded, those of the new token too; the cache has exactly the reference's bits."""
    if DEVICE.type == "cuda" and not fp8.has_fp8_products(DEVICE):
        pytest.skip("needs a GPU that has the type")
    torch.manual_seed(5)
    size, lengths = 4, [1, 70]
    news = [torch.randn(1, key_heads, sum(lengths), d, device=DEVICE).to(dtype) for d in (dim, value_dim)]
    for i, x in enumerate(news):
        x[0, :, ::5, 1] *= 1e-3  # some below the least normal number
        if DEVICE.type == "cpu":  # Triton's interpreter does not round up to the next power of two
            news[i] = x = fp8.saturated(x).to(dtype)
        x[0, :, ::7, 0] *= 2000  # some beyond the largest
    rounded = [fp8.saturated(x) for x in news]
    assert all(bool((x.abs() > 448).any()) for x in news)
    layer = [torch.zeros(32 * key_heads, size, d, dtype=fp8.DTYPE, device=DEVICE) for d in (dim, value_dim)]
    tables = torch.zeros(2, 18, dtype=torch.int32, device=DEVICE)
    blocks = torch.randperm(32, device=DEVICE).int()
    tables[0, 0], tables[1] = blocks[0], blocks[1:19]
    places = [int(tables[row, p // size]) * size + p % size for row, n in enumerate(lengths) for p in range(n)]
    slots = torch.tensor(places, device=DEVICE)
    is_last = torch.tensor([p == n - 1 for n in lengths for p in range(n)], device=DEVICE)
    earlier = torch.where(is_last, -1, slots)
    addresses = torch.tensor([cache.data_ptr() for cache in layer], device=DEVICE)
    write_to_cache(news[0], layer[0], earlier, size, fp8=True)
    write_to_cache(news[1], None, earlier, size, address=addresses[1:], fp8=True)
    query = torch.randn(1, heads, 2, dim, device=DEVICE).to(dtype)
    key, value = (x[:, :, is_last] for x in news)
    out = decode_attention(
        *(query, key, value, addresses, tables),
        torch.arange(2, dtype=torch.int32, device=DEVICE),
        torch.tensor(lengths, device=DEVICE) - 1,
        slots[is_last],
        scale=0.01,
        window=None,
        block_size=size,
        splits=splits,
        fp8=True,
    )
    for cache, expected in zip(layer, rounded):
        held = cache.view(-1, key_heads, size, cache.shape[-1])[slots // size, :, slots % size]
        assert torch.equal(held.view(torch.uint8), expected[0].transpose(0, 1).view(torch.uint8))
    options, first = LayerOptions(0.01), 0
    for row, length in enumerate(lengths):
        k, v = (x[0, :, first : first + length].transpose(0, 1).double() for x in rounded)
        expected = naive_attention(query[0, :, row].double()[None], k, v, options)[0]
        error = (out[0, row].double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
        first += length
