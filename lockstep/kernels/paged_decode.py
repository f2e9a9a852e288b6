"""Attention of one new token per row over a paged KV cache, with grouped queries; and writes to the cache.

A program of the grid serves one row, one key head (with the G query heads that share it) and one split of the cached tokens. A
second kernel joins the splits of a row. The program of split 0 also attends to the new token, whose key and value it has in
registers, and writes them to the cache: nothing is read in the launch that writes it.

A cache in 8 bits holds float8_e4m3fn without scales (`kernels/fp8.py: saturated`). The new token is rounded in registers too: a row
sees the same keys and values whether they were written before this launch or by it.

The addresses of the cache are read from device memory, so that a captured graph stays valid when the cache is reallocated.
Cache of a layer: (num_blocks * HK, block_size, D). Legend: H query heads, HK key heads, G = H / HK.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Most cached tokens per iteration of a program."""
MAX_SPLITS = 16
"""Most splits per row."""
LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(448.0)
"""Of float8_e4m3fn."""


@triton.jit
def _as_cached(x, FP8: tl.constexpr):
    """Keys or values in the cache's type."""
    if FP8:
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return x


@triton.jit
def _base2_logits(products, scale, SOFTCAP: tl.constexpr):
    """log2(e) * logits, for exp2 instead of exp."""
    logits = products * (scale * LOG2E)
    if SOFTCAP is not None:
        tanh = 1.0 - 2.0 / (tl.exp2(logits * (2.0 / SOFTCAP)) + 1.0)
        logits = tanh * (SOFTCAP * LOG2E)
    return logits


@triton.jit(do_not_specialize=["splits"])
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr, sinks_ptr,
    addresses_ptr, tables_ptr, slot_ids_ptr, positions_ptr, cache_slots_ptr,
    q_head, q_token, k_head, k_token, v_head, v_token, table_width, scale, window, chunk, splits,
    G: tl.constexpr, G_PADDED: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
    K_ALIGNMENT: tl.constexpr, V_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions_ptr + row).to(tl.int32)
    dtype = k_ptr.dtype.element_ty
    cached = tl.float8e4nv if FP8 else dtype
    keys = tl.load(addresses_ptr).to(tl.pointer_type(cached))
    values = tl.load(addresses_ptr + 1).to(tl.pointer_type(cached))
    g = tl.arange(0, G_PADDED)
    d = tl.arange(0, D_PADDED)
    e = tl.arange(0, DV_PADDED)
    heads = head * G + g
    q_inside = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + row * q_token + heads[:, None] * q_head + d[None, :], mask=q_inside, other=0.0)

    m = tl.full([G_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([G_PADDED], tl.float32)
    acc = tl.zeros([G_PADDED, DV_PADDED], tl.float32)
    if split == 0:
        k_new = _as_cached(tl.load(k_ptr + row * k_token + head * k_head + d, mask=d < D, other=0.0), FP8)
        v_new = _as_cached(tl.load(v_ptr + row * v_token + head * v_head + e, mask=e < DV, other=0.0), FP8)
        slot = tl.load(cache_slots_ptr + row)
        if slot >= 0:
            place = (slot // BLOCK_SIZE * HK + head) * BLOCK_SIZE + slot % BLOCK_SIZE
            tl.store(keys + place * D + d, k_new, mask=d < D)
            tl.store(values + place * DV + e, v_new, mask=e < DV)
        m = _base2_logits(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1), scale, SOFTCAP)
        weight = total + 1.0
        total = weight
        if sinks_ptr is not None:  # in split 0 alone: it counts once per row
            sink = tl.load(sinks_ptr + heads, mask=g < G, other=0.0).to(tl.float32) * LOG2E
            logit = m
            m = tl.maximum(logit, sink)
            weight = tl.exp2(logit - m)
            total = weight + tl.exp2(sink - m)
        acc = acc + weight[:, None] * v_new.to(tl.float32)[None, :]

    first = tl.maximum(position - window + 1, position // chunk * chunk)
    share = tl.cdiv(tl.cdiv(position - first, splits), TILE) * TILE
    start = first + split * share
    stop = tl.minimum(start + share, position)
    table = tables_ptr + tl.load(slot_ids_ptr + row).to(tl.int64) * table_width
    for at in range(start, stop, TILE):
        p = at + tl.arange(0, TILE)
        inside = p < stop
        block = tl.load(table + p // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = (block * HK + head) * BLOCK_SIZE + p % BLOCK_SIZE
        k_at = tl.multiple_of(keys + place[None, :] * D + d[:, None], [K_ALIGNMENT, 1])
        v_at = tl.multiple_of(values + place[:, None] * DV + e[None, :], [1, V_ALIGNMENT])
        k = tl.load(k_at, mask=inside[None, :] & (d < D)[:, None], other=0.0).to(dtype)
        scores = _base2_logits(tl.dot(q, k, input_precision=PRECISION), scale, SOFTCAP)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_at, mask=inside[:, None] & (e < DV)[None, :], other=0.0).to(dtype)
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
def _join(partial_ptr, stats_ptr, out_ptr, splits, DV: tl.constexpr, DV_PADDED: tl.constexpr, MAX_SPLITS: tl.constexpr):
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


def num_splits(num_programs: int, dim: int, max_splits: int) -> int:
    """Splits per row and key head, of which there are `num_programs`: as many as keep the device busy."""
    target = 512 if dim <= 64 else 256
    return max(1, min(target // num_programs, max_splits))


def _tile_warps_stages(dim: int, groups: int, dtype: torch.dtype, num_programs: int) -> tuple[int, int, int]:
    """Cached tokens per iteration, warps and pipeline stages; the fastest of those measured on an H200."""
    half = dtype != torch.float32
    if dim > 128:
        return TILE, 4, 2
    if half and groups <= 16:
        if dim <= 64 or num_programs > 768:
            return TILE // 2, 1, 5 if dim <= 64 else 4
        return TILE, 2, 5 if num_programs <= 264 else 3
    return TILE, 2, 3 if half else 2


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    addresses: Tensor,
    tables: Tensor,
    slot_ids: Tensor,
    positions: Tensor,
    cache_slots: Tensor,
    *,
    scale: float,
    window: int | None,
    block_size: int,
    splits: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    fp8: bool = False,
) -> Tensor:
    """query (1, H, T, D), key and value (1, HK, T, D) of one new token of each of T rows -> (1, T, H, DV).

    addresses:   (2,) int64, addresses of the layer's keys and values.
    tables:      (slots, width) int32 blocks; row r uses tables[slot_ids[r]].
    positions:   (T,) position of each new token, i.e. the number of cached tokens of its row.
    cache_slots: (T,) where the new token is written, block * block_size + offset; -1 for nowhere.
    splits:      programs that share the cached tokens of one row and key head, at most `MAX_SPLITS`.
    window, softcap, sinks, chunk: as in `LayerOptions`.
    fp8:         the cache is in 8 bits.
    """
    _, num_heads, length, dim = query.shape
    key_heads, value_dim = key.shape[1], value.shape[-1]
    out = torch.empty(1, length, num_heads, value_dim, dtype=query.dtype, device=query.device)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(length, num_heads, splits, value_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(length, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    groups = num_heads // key_heads
    programs = length * key_heads * splits
    tile, num_warps, num_stages = _tile_warps_stages(dim, groups, query.dtype, programs)
    tensors = (query, key, value, out, partial, stats, sinks, addresses, tables, slot_ids, positions, cache_slots)
    strides = [stride for t in (query, key, value) for stride in t.stride()[1:3]]
    itemsize = 1 if fp8 else query.dtype.itemsize
    _decode[(length, key_heads, splits)](
        *tensors, *strides, tables.stride(0), scale, (1 << 30) if window is None else window,
        (1 << 30) if chunk is None else chunk, splits,
        G=groups, G_PADDED=max(16, triton.next_power_of_2(groups)), HK=key_heads,
        D=dim, D_PADDED=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PADDED=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_SIZE=block_size, TILE=tile, SPLIT=splits > 1, SOFTCAP=softcap,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", FP8=fp8,
        K_ALIGNMENT=gcd(16, dim * itemsize), V_ALIGNMENT=gcd(16, value_dim * itemsize),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        _join[(length * num_heads,)](
            partial, stats, out, splits, value_dim, triton.next_power_of_2(value_dim), MAX_SPLITS, num_warps=1
        )
    return out


@triton.jit
def _write(
    x_ptr, cache_ptr, address_ptr, slots_ptr, stride_head, stride_token,
    HK: tl.constexpr, HK_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = tl.arange(0, HK_PADDED)
    d = tl.arange(0, D_PADDED)
    if address_ptr is not None:
        cache_ptr = tl.load(address_ptr).to(tl.pointer_type(tl.float8e4nv if FP8 else x_ptr.dtype.element_ty))
    inside = (head < HK)[:, None] & (d < D)[None, :] & (slot >= 0)
    x = tl.load(x_ptr + token * stride_token + head[:, None] * stride_head + d[None, :], mask=inside)
    place = (slot // BLOCK_SIZE * HK + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    tl.store(cache_ptr + place[:, None] * D + d[None, :], _as_cached(x, FP8), mask=inside)


def write_to_cache(
    x: Tensor,
    cache: Tensor | None,
    slots: Tensor,
    block_size: int,
    *,
    address: Tensor | None = None,
    fp8: bool = False,
) -> None:
    """Write the keys or values x (1, HK, T, D) to their cache slots (T,) of a layer; slot -1 is nowhere. D may be 0.

    cache: the layer's keys or values; None if `address` says where they are. fp8: they are in 8 bits.
    """
    _, heads, length, dim = x.shape
    if dim == 0:
        return
    padded_heads, padded_dim = triton.next_power_of_2(heads), triton.next_power_of_2(dim)
    shape = heads, padded_heads, dim, padded_dim, block_size, fp8
    _write[(length,)](x, x if cache is None else cache, address, slots, *x.stride()[1:3], *shape, num_warps=2)
