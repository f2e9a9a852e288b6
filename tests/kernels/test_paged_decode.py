"""Decode attention over a paged cache against plain attention over each row's tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.kernel_device import kernel_device

DEVICE = kernel_device()
from lockstep.kernels.paged_decode import decode_attention, write_to_cache  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
BLOCKS = 80


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """q (H, D) at the last of the tokens k (L, HK, D), v (L, HK, DV) -> (H, DV), in double precision."""
    if window is not None:
        k, v = k[-window:], v[-window:]
    q, k, v = q.double()[None, :, None], k.double().transpose(0, 1)[None], v.double().transpose(0, 1)[None]
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)[0, :, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "value_dim", "size"), [(14, 2, 64, 64, 16), (4, 4, 80, 80, 4), (6, 1, 24, 16, 1)]
)
def test_rows_equal_plain_attention(
    dtype: torch.dtype,
    splits: int,
    window: int | None,
    heads: int,
    key_heads: int,
    dim: int,
    value_dim: int,
    size: int,
) -> None:
    torch.manual_seed(3)
    lengths = [1, 2, 65, 200] if size == 16 else [1, 17, 60, 2]
    layer = [torch.randn(BLOCKS * 4 * key_heads, size, d, device=DEVICE).to(dtype) for d in (dim, value_dim)]
    order = torch.randperm(BLOCKS * 4)
    tables = torch.zeros(9, 64, dtype=torch.int32)
    seats, slots, expected, news = [3, 0, 7, 5], [], [], []
    used = 0
    for seat, length in zip(seats, lengths):
        count = -(-length // size)
        tables[seat, :count] = order[used : used + count]
        used += count
        q = torch.randn(heads, dim, device=DEVICE).to(dtype)
        k = torch.randn(length, key_heads, dim, device=DEVICE).to(dtype)
        v = torch.randn(length, key_heads, value_dim, device=DEVICE).to(dtype)
        places = [int(tables[seat, p // size]) * size + p % size for p in range(length)]
        at = torch.tensor(places[:-1], dtype=torch.int64, device=DEVICE)
        if length > 1:
            for x, cache in zip((k, v), layer):
                write_to_cache(x[:-1].transpose(0, 1)[None], cache, at, size)
        slots.append(places[-1])
        news.append((q, k[-1], v[-1]))
        expected.append(plain(q, k, v, 0.3, window))
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
        torch.tensor([*seats, 8], dtype=torch.int32, device=DEVICE),
        torch.tensor([n - 1 for n in lengths] + [0], device=DEVICE),
        torch.tensor([*slots, -1], device=DEVICE),
        scale=0.3,
        window=window,
        block_size=size,
        splits=splits,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[0, :-1].double(), torch.stack(expected), atol=tolerance, rtol=tolerance)
    for old, cache, new in zip(before, layer, (key, value)):
        for row, slot in enumerate(slots):
            block = cache.view(-1, key_heads, size, cache.shape[-1])[slot // size, :, slot % size]
            assert torch.equal(block, new[0, :, row])
        assert int((old != cache).any(-1).sum()) <= len(slots) * key_heads  # nothing else was written
