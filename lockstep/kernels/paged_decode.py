"""Grouped-query attention of one new token per row over a paged KV cache, and the writing of keys and values to it.

Each program serves one row, one key head (with the G query heads that share it) and one stretch of the cached tokens; the stretches
of a row are joined by a second kernel. The first program of a row and head also takes the new token, from its own registers, and
writes it to the cache, so that nothing is read in the launch that wrote it.

The cache's addresses are read from a small table in device memory: a captured graph stays valid when the cache is allocated anew.
Cache of a layer: (num_blocks * HK, block_size, D). Legend: H query heads, HK key heads, G = H / HK, S stretches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Most cached tokens that a program takes at a time."""
MAX_SPLITS = 16
"""Most stretches of one row."""


@triton.jit(do_not_specialize=["splits"])
def _decode(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    table_width: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    G: tl.constexpr,
    G_PADDED: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions_ptr + row).to(tl.int32)
    dtype = k_ptr.dtype.element_ty
    keys = tl.load(addresses_ptr).to(tl.pointer_type(dtype))
    values = tl.load(addresses_ptr + 1).to(tl.pointer_type(dtype))
    g = tl.arange(0, G_PADDED)
    d = tl.arange(0, D_PADDED)
    e = tl.arange(0, DV_PADDED)
    heads = head * G + g
    q_inside = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + row * q_token + heads[:, None] * q_head + d[None, :], mask=q_inside, other=0.0)
    scale2 = scale * 1.4426950408889634  # powers of two instead of e

    m = tl.full([G_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([G_PADDED], tl.float32)
    acc = tl.zeros([G_PADDED, DV_PADDED], tl.float32)
    if split == 0:
        k_new = tl.load(k_ptr + row * k_token + head * k_head + d, mask=d < D, other=0.0)
        v_new = tl.load(v_ptr + row * v_token + head * v_head + e, mask=e < DV, other=0.0)
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            place = (slot // BLOCK_SIZE * HK + head) * BLOCK_SIZE + slot % BLOCK_SIZE
            tl.store(keys + place * D + d, k_new, mask=d < D)
            tl.store(values + place * DV + e, v_new, mask=e < DV)
        m = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale2
        total = total + 1.0
        acc = acc + v_new.to(tl.float32)[None, :]

    first = tl.maximum(position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(position - first, splits), TILE) * TILE
    start = first + split * share
    stop = tl.minimum(start + share, position)
    table = tables_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_width
    for at in range(start, stop, TILE):
        p = at + tl.arange(0, TILE)
        inside = p < stop
        block = tl.load(table + p // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = (block * HK + head) * BLOCK_SIZE + p % BLOCK_SIZE
        k_at = tl.multiple_of(keys + place[None, :] * D + d[:, None], [16, 1])
        v_at = tl.multiple_of(values + place[:, None] * DV + e[None, :], [1, 16])
        k = tl.load(k_at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale2
        scores = tl.where(inside[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_at, mask=inside[:, None] & (e < DV)[None, :], other=0.0)
        acc = tl.dot(weights.to(dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new

    o_inside = (g < G)[:, None] & (e < DV)[None, :]
    place = row * (HK * G) + heads
    if SPLIT:
        place = place * splits + split
        tl.store(partial_ptr + place[:, None] * DV + e[None, :], acc, mask=o_inside)
        tl.store(stats_ptr + place * 2, m, mask=g < G)
        tl.store(stats_ptr + place * 2 + 1, total, mask=g < G)
    else:
        out = acc / total[:, None]
        tl.store(out_ptr + place[:, None] * DV + e[None, :], out.to(out_ptr.dtype.element_ty), mask=o_inside)


@triton.jit(do_not_specialize=["splits"])
def _join(
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    out_ptr: tl.tensor,
    splits: tl.tensor,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, MAX_SPLITS)
    e = tl.arange(0, DV_PADDED)
    at = place * splits + s
    m = tl.load(stats_ptr + at * 2, mask=s < splits, other=-float("inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=s < splits, other=0.0)
    factor = tl.exp2(m - tl.max(m, 0))
    inside = (s < splits)[:, None] & (e < DV)[None, :]
    acc = tl.load(partial_ptr + at[:, None] * DV + e[None, :], mask=inside, other=0.0)
    out = tl.sum(acc * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out_ptr + place * DV + e, out.to(out_ptr.dtype.element_ty), mask=e < DV)


def _tile_warps_stages(dim: int, groups: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Cached tokens at a time, warps and pipeline stages of a program: the fastest of those tried on an H200."""
    half = dtype != torch.float32
    if dim > 128:
        return TILE, 4, 2
    if half and groups <= 16:
        return TILE // 2, 1, 5 if dim <= 64 else 4
    return TILE, 2, 3 if half else 2


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    addresses: Tensor,
    tables: Tensor,
    seats: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    scale: float,
    window: int | None,
    block_size: int,
    splits: int,
) -> Tensor:
    """query (1, H, T, D), key and value (1, HK, T, D) of one new token of each of T rows -> (1, T, H, DV).

    addresses: (2,) int64, where the layer's keys and values begin.
    tables:    (seats, width) int32 blocks; row r uses tables[seats[r]].
    positions: (T,) place of each new token, so many tokens of the row are in the cache.
    slots:     (T,) where the new token is written, block * block_size + offset; -1 for nowhere.
    splits:    stretches of one row's cache that run side by side, at most `MAX_SPLITS`.
    """
    _, num_heads, length, dim = query.shape
    key_heads, value_dim = key.shape[1], value.shape[-1]
    out = torch.empty(1, length, num_heads, value_dim, dtype=query.dtype, device=query.device)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(length, num_heads, splits, value_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(length, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    groups = num_heads // key_heads
    tile, num_warps, num_stages = _tile_warps_stages(dim, groups, query.dtype)
    _decode[(length, key_heads, splits)](
        query,
        key,
        value,
        out,
        partial,
        stats,
        addresses,
        tables,
        seats,
        positions,
        slots,
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        tables.stride(0),
        scale,
        (1 << 30) if window is None else window,
        splits,
        G=groups,
        G_PADDED=max(16, triton.next_power_of_2(groups)),
        HK=key_heads,
        D=dim,
        D_PADDED=max(16, triton.next_power_of_2(dim)),
        DV=value_dim,
        DV_PADDED=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_SIZE=block_size,
        TILE=tile,
        SPLIT=splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if splits > 1:
        _join[(length * num_heads,)](
            partial, stats, out, splits, value_dim, triton.next_power_of_2(value_dim), MAX_SPLITS, num_warps=1
        )
    return out


@triton.jit
def _write(
    x_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    HK: tl.constexpr,
    HK_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = tl.arange(0, HK_PADDED)
    d = tl.arange(0, D_PADDED)
    inside = (head < HK)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + token * stride_token + head[:, None] * stride_head + d[None, :], mask=inside)
    place = (slot // BLOCK_SIZE * HK + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    tl.store(cache_ptr + place[:, None] * D + d[None, :], x, mask=inside)


def write_to_cache(x: Tensor, cache: Tensor, slots: Tensor, block_size: int) -> None:
    """Put the keys or values x (1, HK, T, D) into their slots (T,) of a layer's cache."""
    _, heads, length, dim = x.shape
    _write[(length,)](
        x,
        cache,
        slots,
        x.stride(1),
        x.stride(2),
        heads,
        triton.next_power_of_2(heads),
        dim,
        triton.next_power_of_2(dim),
        block_size,
        num_warps=2,
    )
