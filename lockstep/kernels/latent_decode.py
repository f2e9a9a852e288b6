"""Attention of one new token per row over a paged cache of latents (MLA): all heads have one key, which is also their value.

A cached token is R + DR numbers, the latent and the rope key. Scores are of all of them; the output is a mix of the latents, of R.
A program of the grid serves one row, `HEADS` query heads and one split of the cached tokens: it loads a tile of latents once and
uses it as keys and as values. The rest is as in `kernels/paged_decode.py`: a second kernel joins the splits, the new token's key is
in registers and is written to the cache by one program, and the cache's address is read from device memory.

If an index picks keys (`kernels/key_scores.py`), a row attends to those positions. The new token is in the cache then, and may be
picked or not.

Cache of a layer: (num_blocks, block_size, W), W = R + DR or more. Legend: H query heads, R latent size, DR size of the rope key.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.paged_decode import MAX_SPLITS, _base2_logits, _join

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["splits"])
def _decode_latents(
    q_ptr, k_ptr, out_ptr, partial_ptr, stats_ptr, sinks_ptr,
    addresses_ptr, tables_ptr, slot_ids_ptr, positions_ptr, cache_slots_ptr, picked_ptr, topk,
    q_head, q_token, k_token, table_width, scale, window, chunk, splits,
    H: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr,
    DR: tl.constexpr, DR_PADDED: tl.constexpr, W: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    R_ALIGNMENT: tl.constexpr, DR_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    position = tl.load(positions_ptr + row).to(tl.int32)
    dtype = k_ptr.dtype.element_ty
    keys = tl.load(addresses_ptr).to(tl.pointer_type(dtype))
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    r = tl.arange(0, R_PADDED)
    d = tl.arange(0, DR_PADDED)
    q_at = q_ptr + row * q_token + heads[:, None] * q_head
    q = tl.load(q_at + r[None, :], mask=(heads < H)[:, None] & (r < R)[None, :], other=0.0)
    q_rope = tl.load(q_at + R + d[None, :], mask=(heads < H)[:, None] & (d < DR)[None, :], other=0.0)

    m = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, R_PADDED], tl.float32)
    if picked_ptr is None and split == 0:
        new = tl.load(k_ptr + row * k_token + r, mask=r < R, other=0.0)
        new_rope = tl.load(k_ptr + row * k_token + R + d, mask=d < DR, other=0.0)
        if cache_slots_ptr is not None:
            slot = tl.load(cache_slots_ptr + row)
            if (tl.program_id(0) == 0) & (slot >= 0):
                tl.store(keys + slot * W + r, new, mask=r < R)
                tl.store(keys + slot * W + R + d, new_rope, mask=d < DR)
        products = tl.sum(q.to(tl.float32) * new.to(tl.float32)[None, :], 1)
        products += tl.sum(q_rope.to(tl.float32) * new_rope.to(tl.float32)[None, :], 1)
        m = _base2_logits(products, scale, SOFTCAP)
        weight = total + 1.0
        total = weight
        if sinks_ptr is not None:  # in split 0 alone: it counts once per row
            sink = tl.load(sinks_ptr + heads, mask=heads < H, other=0.0).to(tl.float32) * LOG2E
            logit = m
            m = tl.maximum(logit, sink)
            weight = tl.exp2(logit - m)
            total = weight + tl.exp2(sink - m)
        acc = acc + weight[:, None] * new.to(tl.float32)[None, :]

    first = tl.maximum(position - window + 1, position // chunk * chunk)
    count = position - first
    if picked_ptr is not None:
        is_picked = count >= topk  # else the row sees no more than `topk` keys, its own included
        count = tl.minimum(count + 1, topk)
        if sinks_ptr is not None and split == 0:
            m = tl.load(sinks_ptr + heads, mask=heads < H, other=0.0).to(tl.float32) * LOG2E
            total = total + 1.0
    share = tl.cdiv(tl.cdiv(count, splits), TILE) * TILE
    start = split * share
    stop = tl.minimum(start + share, count)
    table = tables_ptr + tl.load(slot_ids_ptr + row).to(tl.int64) * table_width
    for at in range(start, stop, TILE):
        number = at + tl.arange(0, TILE)
        inside = number < stop
        p = first + number
        if picked_ptr is not None:
            picked = tl.load(picked_ptr + row * topk + number, mask=inside & is_picked, other=0).to(tl.int32)
            p = tl.where(is_picked, picked, p)
        block = tl.load(table + p // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        token = keys + (block * BLOCK_SIZE + p % BLOCK_SIZE) * W
        latents_at = tl.multiple_of(token[:, None] + r[None, :], [1, R_ALIGNMENT])
        ropes_at = tl.multiple_of(token[None, :] + R + d[:, None], [DR_ALIGNMENT, 1])
        latents = tl.load(latents_at, mask=inside[:, None] & (r < R)[None, :], other=0.0)
        ropes = tl.load(ropes_at, mask=inside[None, :] & (d < DR)[:, None], other=0.0)
        products = tl.dot(q_rope, ropes, input_precision=PRECISION)
        products = tl.dot(q, tl.trans(latents), products, input_precision=PRECISION)
        scores = tl.where(inside[None, :], _base2_logits(products, scale, SOFTCAP), -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        weights = tl.exp2(scores - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(dtype), latents, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new

    place = row * H + heads
    inside_out = (heads < H)[:, None] & (r < R)[None, :]
    if SPLIT:
        place = place * splits + split
        tl.store(partial_ptr + place[:, None] * R + r[None, :], acc, mask=inside_out)
        tl.store(stats_ptr + place * 2, m, mask=heads < H)
        tl.store(stats_ptr + place * 2 + 1, total, mask=heads < H)
    else:
        out = acc / total[:, None]
        tl.store(out_ptr + place[:, None] * R + r[None, :], out.to(out_ptr.dtype.element_ty), mask=inside_out)


def _heads_tile_warps_stages(num_heads: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Query heads of a program, cached tokens per iteration, warps and pipeline stages.

    With R = 512 they take 55 to 92 KiB of shared memory, of which most GPUs have 99, and no register is spilled on Hopper.
    """
    if dtype == torch.float32:
        return 16, 16, 8, 2
    return (16, 32, 4, 5) if num_heads <= 16 else (32, 32, 8, 4)


def head_blocks(num_heads: int, dtype: torch.dtype) -> int:
    """Programs per row and split."""
    return -(-num_heads // _heads_tile_warps_stages(num_heads, dtype)[0])


def latent_attention(
    query: Tensor,
    key: Tensor,
    addresses: Tensor,
    tables: Tensor,
    slot_ids: Tensor,
    positions: Tensor,
    cache_slots: Tensor | None,
    *,
    latent_dim: int,
    scale: float,
    window: int | None,
    block_size: int,
    splits: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    picked: Tensor | None = None,
) -> Tensor:
    """query (1, H, T, R + DR), absorbed, and key (1, 1, T, W) of one new token per row -> mixed latents (1, T, H, R).

    addresses:  int64, of which the first is the address of the layer's keys.
    cache_slots: (T,) where the new tokens are written; -1 for nowhere, None if they are in the cache already.
    latent_dim: R.
    splits:     programs that share the cached tokens of one row and block of heads, at most `MAX_SPLITS`.
    picked:     (T, K) positions that each row attends to if it sees more than K; the new tokens are in the cache then.
    The other arguments are those of `decode_attention`.
    """
    _, num_heads, length, dim = query.shape
    out = torch.empty(1, length, num_heads, latent_dim, dtype=query.dtype, device=query.device)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(length, num_heads, splits, latent_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(length, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    heads, tile, num_warps, num_stages = _heads_tile_warps_stages(num_heads, query.dtype)
    itemsize = query.dtype.itemsize
    _decode_latents[(head_blocks(num_heads, query.dtype), length, splits)](
        query, key, out, partial, stats, sinks, addresses, tables, slot_ids, positions, cache_slots,
        picked, 0 if picked is None else picked.shape[1],
        *query.stride()[1:3], key.stride(2), tables.stride(0), scale, (1 << 30) if window is None else window,
        (1 << 30) if chunk is None else chunk, splits,
        H=num_heads, HEADS=heads, R=latent_dim, R_PADDED=max(16, triton.next_power_of_2(latent_dim)),
        DR=dim - latent_dim, DR_PADDED=max(16, triton.next_power_of_2(dim - latent_dim)),
        W=key.shape[-1], BLOCK_SIZE=block_size, TILE=tile, SPLIT=splits > 1, SOFTCAP=softcap,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        R_ALIGNMENT=gcd(16, key.shape[-1] * itemsize),
        DR_ALIGNMENT=gcd(16, key.shape[-1] * itemsize, latent_dim * itemsize),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(latent_dim)
        _join[(length * num_heads,)](partial, stats, out, splits, latent_dim, padded, MAX_SPLITS, num_warps=4)
    return out
