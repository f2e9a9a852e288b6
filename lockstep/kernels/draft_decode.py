"""Attention of decode steps with drafts over a paged KV cache: keys and values are read once for several rows of a sequence.

Every token of such a step is a row: the last token of a sequence and its drafts, with one block table and consecutive positions.
Their keys and values are written before the launch. Up to `GROUP_ROWS` rows of one sequence are a group. A program serves one
group, one key head (with the G query heads that share it) and one split of the keys that the group sees; `_join` joins the splits.

    a group of rows at positions 5, 6 and 7, G = 2      keys of the sequence: 0 1 2 3 | 4 5 6 7
    queries of the program: row at 5, heads 0 and 1                           x x x x | x x
                            row at 6, heads 0 and 1                           x x x x | x x x
                            row at 7, heads 0 and 1                           x x x x | x x x x
                                                                              split 0 | split 1

A program has up to QUERIES queries; a group with more of them, rows x G, is divided among several programs. A launch has a fixed
number of programs, as a CUDA graph needs; those of groups without rows end at once. Cache and legend: `kernels/paged_decode.py`.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.exact_attention import FAR
from lockstep.kernels.paged_decode import LOG2E, MAX_SPLITS, _base2_logits, _join, num_splits

GROUP_ROWS = 8
"""Most rows of a group."""


@triton.jit(do_not_specialize=["splits"])
def _decode_group(
    q_ptr, out_ptr, partial_ptr, stats_ptr, sinks_ptr,
    addresses_ptr, tables_ptr, slot_ids_ptr, positions_ptr, group_starts_ptr,
    q_head, q_token, table_width, scale, window, chunk, splits,
    G: tl.constexpr, HK: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
    K_ALIGNMENT: tl.constexpr, V_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    first_row = tl.load(group_starts_ptr + tl.program_id(0)).to(tl.int32)
    num_queries = (tl.load(group_starts_ptr + tl.program_id(0) + 1).to(tl.int32) - first_row) * G
    head = tl.program_id(1) % HK
    first_query = tl.program_id(1) // HK * QUERIES
    split = tl.program_id(2)
    if first_query >= num_queries:
        return
    query = first_query + tl.arange(0, QUERIES)
    inside = query < num_queries
    row = first_row + query // G
    heads = head * G + query % G
    d = tl.arange(0, D_PADDED)
    e = tl.arange(0, DV_PADDED)
    dtype = q_ptr.dtype.element_ty
    cached = tl.float8e4nv if FP8 else dtype
    keys = tl.load(addresses_ptr).to(tl.pointer_type(cached))
    values = tl.load(addresses_ptr + 1).to(tl.pointer_type(cached))
    q_at = q_ptr + (row.to(tl.int64) * q_token + heads * q_head)[:, None] + d[None, :]
    q = tl.load(q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)

    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DV_PADDED], tl.float32)
    if sinks_ptr is not None and split == 0:  # in one split alone: it counts once per query
        m = tl.load(sinks_ptr + heads, mask=inside, other=0.0).to(tl.float32) * LOG2E
        total = total + 1.0

    # the keys that each query sees, and those that any of them sees
    last = tl.load(positions_ptr + row, mask=inside, other=-1).to(tl.int32)
    first = tl.maximum(last - window + 1, last // chunk * chunk)
    end = tl.max(last, 0) + 1
    start = tl.min(tl.where(inside, first, end), 0)
    share = tl.cdiv(tl.cdiv(end - start, splits), TILE) * TILE
    start = start + split * share
    stop = tl.minimum(start + share, end)
    table = tables_ptr + tl.load(slot_ids_ptr + first_row).to(tl.int64) * table_width
    for at in range(start, stop, TILE):
        p = at + tl.arange(0, TILE)
        block = tl.load(table + p // BLOCK_SIZE, mask=p < stop, other=0).to(tl.int64)
        place = (block * HK + head) * BLOCK_SIZE + p % BLOCK_SIZE
        k_at = tl.multiple_of(keys + place[None, :] * D + d[:, None], [K_ALIGNMENT, 1])
        v_at = tl.multiple_of(values + place[:, None] * DV + e[None, :], [1, V_ALIGNMENT])
        k = tl.load(k_at, mask=(p < stop)[None, :] & (d < D)[:, None], other=0.0).to(dtype)
        scores = _base2_logits(tl.dot(q, k, input_precision=PRECISION), scale, SOFTCAP)
        seen = (p[None, :] >= first[:, None]) & (p[None, :] <= last[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)  # no key was seen yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_at, mask=(p < stop)[:, None] & (e < DV)[None, :], other=0.0).to(dtype)
        acc = tl.dot(weights.to(dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new

    o_inside = inside[:, None] & (e < DV)[None, :]
    place = row.to(tl.int64) * (HK * G) + heads
    if SPLIT:
        place = place * splits + split
        tl.store(partial_ptr + place[:, None] * DV + e[None, :], acc, mask=o_inside)
        tl.store(stats_ptr + place * 2, m, mask=inside)
        tl.store(stats_ptr + place * 2 + 1, total, mask=inside)
    else:
        out = acc / total[:, None]
        tl.store(out_ptr + place[:, None] * DV + e[None, :], out.to(out_ptr.dtype.element_ty), mask=o_inside)


def _queries_tile_warps_stages(dim: int, groups: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries of a program, keys per iteration, warps and pipeline stages; in half precision measured on an H200.

    They take at most 98 KiB of shared memory, of which most GPUs have 99, and no register is spilled on Hopper.
    """
    if dtype == torch.float32:
        return 16, 16, 4 if dim <= 128 else 8, 2
    if dim > 128:
        return 32, 32, 8, 3 if dim <= 256 else 2
    queries = max(16, min(64, triton.next_power_of_2(GROUP_ROWS * groups)))
    tile, stages = (64, 3) if dim <= 64 else (32, 5)
    return queries, tile, 2 if queries == 16 else 4, stages


def draft_attention(
    query: Tensor,
    addresses: Tensor,
    tables: Tensor,
    slot_ids: Tensor,
    positions: Tensor,
    group_starts: Tensor,
    *,
    key_heads: int,
    value_dim: int,
    scale: float,
    window: int | None,
    block_size: int,
    max_splits: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    fp8: bool = False,
) -> Tensor:
    """query (1, H, T, D) of T rows whose keys and values are cached -> (1, T, H, DV).

    group_starts: (P + 1,) group i has the rows from group_starts[i] up to group_starts[i + 1], at most `GROUP_ROWS` rows of one
                  sequence. Every row is in a group; unused groups are empty.
    max_splits:   most programs that share the keys of one group and key head, at most `MAX_SPLITS`.
    The other arguments are those of `decode_attention`.
    """
    _, num_heads, length, dim = query.shape
    out = torch.empty(1, length, num_heads, value_dim, dtype=query.dtype, device=query.device)
    groups = num_heads // key_heads
    queries, tile, num_warps, num_stages = _queries_tile_warps_stages(dim, groups, query.dtype)
    heads = key_heads * triton.cdiv(GROUP_ROWS * groups, queries)
    splits = num_splits(heads * triton.cdiv(length, GROUP_ROWS), dim, max_splits)
    partial = stats = out
    if splits > 1:
        partial = torch.empty(length, num_heads, splits, value_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(length, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    itemsize = 1 if fp8 else query.dtype.itemsize
    _decode_group[(len(group_starts) - 1, heads, splits)](
        *(query, out, partial, stats, sinks, addresses, tables, slot_ids, positions, group_starts),
        *query.stride()[1:3], tables.stride(0),
        *(scale, FAR if window is None else window, FAR if chunk is None else chunk, splits),
        G=groups, HK=key_heads, QUERIES=queries, D=dim, D_PADDED=max(16, triton.next_power_of_2(dim)),
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
