"""Attention on CUDA whose result for a query depends on its keys alone (`models/exact_attention.py`).

A program serves some rows of one sequence and key head; a row is one query of one of the G heads that share the key head. It
goes through the keys from the sequence's first to the last that a query of the program sees, `KEYS` at a time. The new tokens of
decoding, prefill and training run this kernel, with fewer rows per program for the first. Both sums of a block, over weights and
over weighted values, are matrix products: those add in one order, whatever the number of rows and warps.

Keys and values are in blocks, as in the cache of a layer, (num_blocks * HK, block_size, D); rows of gathered keys (N, HK, K, D)
are N blocks of K tokens. Legend: H query heads, HK key heads, G = H / HK.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.paged_decode import _base2_logits

KEYS = 64
FEW_ROWS, ROWS = 16, 64
"""Rows of a program: few if one holds all rows of a sequence."""
LOG2E = tl.constexpr(1.4426950408889634)
FAR = 1 << 30
"""A window or chunk that hides nothing."""


@triton.jit(do_not_specialize=["num_queries", "block_size", "table_width"])
def _attend(
    q_ptr, k_ptr, v_ptr, addresses_ptr, out_ptr, sinks_ptr, tables_ptr, table_rows_ptr, positions_ptr,
    q_row, q_head, q_query, position_row, table_width, num_queries, block_size, scale, window, chunk,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    query = place // G
    inside = query < num_queries
    heads = head * G + place % G
    d = tl.arange(0, D_PADDED)
    e = tl.arange(0, DV_PADDED)
    dtype = q_ptr.dtype.element_ty
    if addresses_ptr is not None:
        keys = tl.load(addresses_ptr).to(tl.pointer_type(dtype))
        values = tl.load(addresses_ptr + 1).to(tl.pointer_type(dtype))
    else:
        keys = k_ptr
        values = v_ptr
    position = tl.load(positions_ptr + sequence * position_row + query, mask=inside, other=0).to(tl.int32)
    q_at = q_ptr + sequence * q_row + (heads.to(tl.int64) * q_head + query.to(tl.int64) * q_query)[:, None] + d[None, :]
    q = tl.load(q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    table = tables_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_width

    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)  # equal columns: the least that a product has
    ones = tl.full([KEYS, 16], 1.0, dtype)
    acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
    # positions of queries do not fall
    first = tl.load(positions_ptr + sequence * position_row + tl.program_id(2) * ROWS // G).to(tl.int32)
    last_query = tl.minimum((tl.program_id(2) * ROWS + ROWS - 1) // G, num_queries - 1)
    last = tl.load(positions_ptr + sequence * position_row + last_query).to(tl.int32)
    start = tl.maximum(tl.maximum(first - window + 1, first // chunk * chunk), 0) // KEYS * KEYS
    for at in range(start, last + 1, KEYS):
        p = at + tl.arange(0, KEYS)
        block = tl.load(table + p // block_size, mask=p <= last, other=0).to(tl.int64)
        token = (block * HK + head) * block_size + p % block_size
        k_at = keys + token[None, :] * D + d[:, None]
        v_at = values + token[:, None] * DV + e[None, :]
        if ALIGNED:  # an address that was read tells the compiler nothing
            k_at = tl.multiple_of(k_at, [16, 1])
            v_at = tl.multiple_of(v_at, [1, 16])
        k = tl.load(k_at, mask=(p <= last)[None, :] & (d < D)[:, None], other=0.0)
        scores = _base2_logits(tl.dot(q, k, input_precision=PRECISION), scale, SOFTCAP)
        seen = (p[None, :] <= position[:, None]) & (p[None, :] > position[:, None] - window)
        seen = seen & (p[None, :] >= (position // chunk * chunk)[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)  # no key was seen yet
        weights = tl.exp2(scores - base[:, None]).to(dtype)
        shrink = tl.exp2(m - base)[:, None]
        total = tl.dot(weights, ones, total * shrink, input_precision=PRECISION)
        v = tl.load(v_at, mask=(p <= last)[:, None] & (e < DV)[None, :], other=0.0)
        acc = tl.dot(weights, v, acc * shrink, input_precision=PRECISION)
        m = m_new
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=inside, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        shrink = tl.exp2(m - m_new)[:, None]
        total = total * shrink + tl.exp2(sink - m_new)[:, None]
        acc = acc * shrink
    out = acc / (tl.sum(total, 1) / 16)[:, None]
    out_at = out_ptr + ((sequence * num_queries + query) * (HK * G) + heads)[:, None] * DV + e[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (e < DV)[None, :])


def attend(
    query: Tensor,
    stores: tuple[Tensor, Tensor] | Tensor,
    tables: Tensor,
    table_rows: Tensor,
    positions: Tensor,
    *,
    key_heads: int,
    value_dim: int,
    block_size: int,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query (N, H, Q, D) -> (N, Q, H, DV).

    stores:     keys and values in blocks, or the (2,) addresses of both.
    tables:     blocks of sequences; row n of the queries uses tables[table_rows[n]].
    positions:  (N or 1, Q) of the queries in their sequences; they do not fall.
    The other arguments are those of `LayerOptions`.
    """
    num_rows, num_heads, length, dim = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    keys, values, addresses = (query, query, stores) if isinstance(stores, Tensor) else (*stores, None)
    out = torch.empty(num_rows, length, num_heads, value_dim, dtype=query.dtype, device=query.device)
    groups = num_heads // key_heads
    half = query.dtype != torch.float32
    rows = FEW_ROWS if length * groups <= FEW_ROWS else ROWS
    aligned = all(size * query.element_size() % 16 == 0 for size in (dim, value_dim))
    _attend[(num_rows, key_heads, triton.cdiv(length * groups, rows))](
        *(query, keys, values, addresses, out, sinks, tables, table_rows, positions),
        *query.stride()[:3], positions.stride(0) if len(positions) > 1 else 0, tables.stride(0), length, block_size,
        *(scale, FAR if window is None else window, FAR if chunk is None else chunk),
        G=groups, HK=key_heads, D=dim, D_PADDED=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PADDED=max(16, triton.next_power_of_2(value_dim)),
        ROWS=rows, KEYS=KEYS, SOFTCAP=softcap, PRECISION="tf32" if half else "ieee", ALIGNED=aligned,
        num_warps=2 if rows == FEW_ROWS else 4, num_stages=1 if not half else 3 if rows == FEW_ROWS else 2,
    )  # fmt: skip
    return out
