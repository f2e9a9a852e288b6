"""Decode attention over a paged cache against the formula over each row's tokens."""

import pytest
import torch

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
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
