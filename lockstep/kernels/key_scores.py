"""Scores of all cached keys of an index (`models/key_index.py`) for one new token per row.

    score of a key = Σ_h weight_h * relu(query_h · key)      -inf for a key that the row does not see

A program serves one row and `TILE` positions. The scorer's key is the last part of what is cached for a token. All positions that
a block table can have are scored, whatever the row's length, so that a captured CUDA graph serves rows of any length.
Legend: T rows, HI heads of the scorer of size DI, W numbers per cached token.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _score(
    q_ptr, weights_ptr, like_ptr, out_ptr, addresses_ptr, tables_ptr, slot_ids_ptr, positions_ptr,
    q_token, q_head, weights_token, table_width, num_positions, window, chunk,
    HI: tl.constexpr, HI_PADDED: tl.constexpr, DI: tl.constexpr, DI_PADDED: tl.constexpr, W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    position = tl.load(positions_ptr + row).to(tl.int32)
    first = tl.maximum(position - window + 1, position // chunk * chunk)
    seen = (p >= first) & (p <= position)
    scores = tl.full([TILE], -float("inf"), tl.float32)
    if (tl.program_id(0) * TILE <= position) & (tl.program_id(0) * TILE + TILE > first):
        h = tl.arange(0, HI_PADDED)
        d = tl.arange(0, DI_PADDED)
        q_at = q_ptr + row * q_token + h[:, None] * q_head + d[None, :]
        q = tl.load(q_at, mask=(h < HI)[:, None] & (d < DI)[None, :], other=0.0)
        weights = tl.load(weights_ptr + row * weights_token + h, mask=h < HI, other=0.0).to(tl.float32)
        keys = tl.load(addresses_ptr).to(tl.pointer_type(like_ptr.dtype.element_ty))
        table = tables_ptr + tl.load(slot_ids_ptr + row).to(tl.int64) * table_width
        block = tl.load(table + p // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        token = keys + (block * BLOCK_SIZE + p % BLOCK_SIZE) * W + (W - DI)
        k_at = tl.multiple_of(token[None, :] + d[:, None], [ALIGNMENT, 1])
        k = tl.load(k_at, mask=seen[None, :] & (d < DI)[:, None], other=0.0).to(q.dtype)
        products = tl.maximum(tl.dot(q, k, input_precision=PRECISION), 0.0)
        scores = tl.where(seen, tl.sum(products * weights[:, None], 0), scores)
    tl.store(out_ptr + row * num_positions + p, scores, mask=p < num_positions)


def key_scores(
    queries: Tensor,
    weights: Tensor,
    key: Tensor,
    addresses: Tensor,
    tables: Tensor,
    slot_ids: Tensor,
    positions: Tensor,
    *,
    window: int | None,
    chunk: int | None,
    block_size: int,
) -> Tensor:
    """queries (1, T, HI, DI) and weights (1, T, HI) of one new token per row -> float32 scores (T, positions of a table).

    key: (1, 1, T, W) of the new tokens, which are in the cache already; gives its width and type.
    The other arguments are those of `decode_attention`.
    """
    _, length, heads, dim = queries.shape
    num_positions = tables.shape[1] * block_size
    out = torch.empty(length, num_positions, dtype=torch.float32, device=queries.device)
    tile, num_warps = (16, 8) if queries.dtype == torch.float32 else (128, 4)
    itemsize = key.dtype.itemsize
    _score[(triton.cdiv(num_positions, tile), length)](
        queries, weights, key, out, addresses, tables, slot_ids, positions,
        *queries.stride()[1:3], weights.stride(1), tables.stride(0), num_positions,
        (1 << 30) if window is None else window, (1 << 30) if chunk is None else chunk,
        HI=heads, HI_PADDED=max(16, triton.next_power_of_2(heads)),
        DI=dim, DI_PADDED=max(16, triton.next_power_of_2(dim)), W=key.shape[-1],
        BLOCK_SIZE=block_size, TILE=tile, PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        ALIGNMENT=gcd(16, key.shape[-1] * itemsize, (key.shape[-1] - dim) * itemsize), num_warps=num_warps,
    )  # fmt: skip
    return out
