"""Experts of few tokens without gradients: each expert has so few rows that a step takes as long as reading the weights.

    choices (T, K) ─► tiles of up to ROWS choices of one expert ─► gate, up, activation(gate) * up * weight ─► down ─► sum per token

Four launches, none of which waits for the host. A row is a pair (token, choice), numbered token * K + choice; rows are never moved:
a tile lists the rows that it gathers from the input and writes to the output. The number of tiles is bounded by sizes alone, so
that a CUDA graph can capture it; programs of tiles that are not used return at once.

The programs of a tile follow each other, and so do the tiles of one expert: all but the first find its weights in the cache. A
program sums over the inner dimension from the first entry to the last, in float32, and a token's rows are summed by their choices.
So the result of a token does not depend on the other tokens; their number decides how many rows a tile has (`rows_per_tile`).
Results are rounded where the grouped products round theirs (`models/experts.py`): after each product, bias, gate and weight.

Shapes as in `kernels/expert_rows.py`, but rows by their numbers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.gated import _sigmoid

MANY_PROGRAMS = 2048
"""From this many on, a program reads 128 columns of a weight instead of 64. With fewer, the last wave would be much of the time."""


class ExpertTiles(NamedTuple):
    """
    experts: (N,) int32, of each tile; -1 for a tile that is not used.
    rows:    (N, ROWS) int32, of each tile; -1 behind its last.
    num_tokens, top_k: T, K.
    """

    experts: Tensor
    rows: Tensor
    num_tokens: int
    top_k: int


def rows_per_tile(num_rows: int, num_experts: int) -> int:
    """So that few experts of an even load need a second tile. Up to 32 the tensor cores' instructions are the same."""
    mean = num_rows / num_experts
    return 16 if mean <= 8 else 32 if mean <= 20 else 64


def max_tiles(num_rows: int, num_experts: int, tile: int) -> int:
    """Most tiles of `tile` rows: at worst, every expert that has rows has one more than fills its other tiles."""
    return (num_rows + (tile - 1) * min(num_rows, num_experts)) // tile


@triton.jit(do_not_specialize=["num_rows"])
def _fill_tile(
    chosen_ptr, experts_ptr, rows_ptr, num_rows, num_experts,
    ROWS: tl.constexpr, MAX_ROWS: tl.constexpr, MAX_EXPERTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.arange(0, MAX_ROWS)
    expert = tl.arange(0, MAX_EXPERTS)
    chosen = tl.load(chosen_ptr + row, mask=row < num_rows, other=-1).to(tl.int32)
    tiles = (tl.histogram(chosen, MAX_EXPERTS, mask=row < num_rows) + (ROWS - 1)) // ROWS
    ends = tl.cumsum(tiles, 0)
    own = tl.sum((ends <= tile).to(tl.int32), 0)  # the first expert whose tiles end behind this one
    tl.store(experts_ptr + tile, tl.where(own < num_experts, own, -1))
    begin = (tile - tl.sum(tl.where(expert < own, tiles, 0), 0)) * ROWS
    is_own = chosen == own
    place = tl.cumsum(is_own.to(tl.int32), 0) - 1 - begin
    tl.store(rows_ptr + tile * ROWS + place, row, mask=is_own & (place >= 0) & (place < ROWS))
    number = tl.sum(is_own.to(tl.int32), 0) - begin
    r = tl.arange(0, ROWS)
    tl.store(rows_ptr + tile * ROWS + r, tl.full([ROWS], -1, tl.int32), mask=r >= number)


def expert_tiles(chosen: Tensor, num_experts: int) -> ExpertTiles:
    """chosen: (T, K) the experts of each token. The rows of an expert are in ascending order."""
    num_rows = chosen.numel()
    tile = rows_per_tile(num_rows, num_experts)
    num_tiles = max_tiles(num_rows, num_experts, tile)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    rows = torch.empty(num_tiles, tile, dtype=torch.int32, device=chosen.device)
    if num_tiles:
        _fill_tile[(num_tiles,)](
            *(chosen.contiguous(), experts, rows, num_rows, num_experts, tile),
            MAX_ROWS=max(256, triton.next_power_of_2(num_rows)),
            MAX_EXPERTS=max(32, triton.next_power_of_2(num_experts)),
            num_warps=4 if num_rows <= 1024 else 8,
        )
    return ExpertTiles(experts, rows, *chosen.shape)


@triton.jit
def _with_bias(x, bias, dtype: tl.constexpr):
    return (x.to(dtype).to(tl.float32) + bias.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _tile_product(
    x_ptr, weight_ptr, bias_ptr, row_weights_ptr, out_ptr, experts_ptr, rows_ptr,
    x_stride, expert_stride, in_stride, column_stride, bias_stride,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, GATED: tl.constexpr, ROWS_PER_X: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(rows_ptr + tile * ROWS + tl.arange(0, ROWS))
    has_row = (row >= 0)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_column = (column < NUM_COLUMNS)[None, :]
    k = tl.arange(0, INNER)
    x_at = x_ptr + (row // ROWS_PER_X).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + expert * expert_stride + k[:, None] * in_stride + column[None, :] * column_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, INNER):
        if WIDTH % INNER == 0:
            x_mask = has_row
            mask = has_column
        else:
            x_mask = has_row & (start + k < WIDTH)[None, :]
            mask = has_column & (start + k < WIDTH)[:, None]
        x = tl.load(x_at, mask=x_mask, other=0.0)
        total = tl.dot(x, tl.load(weight_at, mask=mask, other=0.0), total, input_precision=PRECISION)
        if GATED:
            up = tl.load(weight_at + NUM_COLUMNS * column_stride, mask=mask, other=0.0)
            total_up = tl.dot(x, up, total_up, input_precision=PRECISION)
        x_at += INNER
        weight_at += INNER * in_stride

    dtype = out_ptr.dtype.element_ty
    out = total.to(dtype)
    row_weight = tl.full([ROWS, 1], 1.0, tl.float32)
    if row_weights_ptr is not None:
        row_weight = tl.load(row_weights_ptr + row, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * bias_stride + column
        bias = tl.load(bias_at, mask=column < NUM_COLUMNS, other=0.0).to(tl.float32)[None, :]
        out = _with_bias(out, bias if GATED else bias * row_weight, dtype)
    if GATED:
        up = total_up.to(dtype)
        if bias_ptr is not None:
            up_bias = tl.load(bias_at + NUM_COLUMNS, mask=column < NUM_COLUMNS, other=0.0).to(tl.float32)[None, :]
            up = _with_bias(up, up_bias, dtype)
        gate = out.to(tl.float32)
        product = (gate * _sigmoid(gate, True) * up.to(tl.float32)).to(dtype)
        out = (product.to(tl.float32) * row_weight).to(dtype)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :], out, mask=has_row & has_column)


def expert_product(
    x: Tensor, weight: Tensor, tiles: ExpertTiles, bias: Tensor | None = None, bias_weights: Tensor | None = None
) -> Tensor:
    """x times the weight of each row's expert, plus its bias times `bias_weights` of the row: (S, out).

    x: (T, in) of tokens, or (S, in) of rows. weight: (E, in, out), also a transposed view. bias: (E, out). bias_weights: (T, K).
    """
    return _product(x, weight, tiles, bias, bias_weights, gated=False)


def expert_gate(x: Tensor, weight: Tensor, tiles: ExpertTiles, bias: Tensor | None, row_weights: Tensor) -> Tensor:
    """silu(gate) * up * row_weights (T, K) of x (T, in): (S, I). weight: (E, in, 2 I), gate first, also a transposed view."""
    return _product(x, weight, tiles, bias, row_weights, gated=True)


def _product(
    x: Tensor, weight: Tensor, tiles: ExpertTiles, bias: Tensor | None, row_weights: Tensor | None, gated: bool
) -> Tensor:
    assert x.dtype == weight.dtype, "operands of different types"
    num_tiles, rows = tiles.rows.shape
    num_rows = tiles.num_tokens * tiles.top_k
    _, width, num_columns = weight.shape
    num_columns //= 1 + gated
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    columns, inner, num_stages = _columns_inner_stages(num_tiles, width, num_columns * (1 + gated), rows, x.dtype)
    columns //= 1 + gated
    if num_rows:
        _tile_product[(triton.cdiv(num_columns, columns), num_tiles)](
            x, weight, bias, None if row_weights is None else row_weights.contiguous(), out, tiles.experts, tiles.rows,
            x.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0),
            WIDTH=width, NUM_COLUMNS=num_columns, GATED=gated, ROWS_PER_X=num_rows // len(x),
            ROWS=rows, COLUMNS=columns, INNER=inner, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=4, num_stages=num_stages,
        )  # fmt: skip
    return out


def _columns_inner_stages(
    num_tiles: int, width: int, num_columns: int, rows: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """What a program reads of a weight: columns, entries of the inner dimension per iteration, pipeline stages.

    In half precision they take at most 80 KiB of shared memory, which consumer GPUs have too. So two or more programs are on a
    multiprocessor of Hopper, with more bytes under way than its share of the memory's bandwidth needs, and spill no registers.
    """
    if dtype == torch.float32:
        return 64, 32, 2
    inner = 128 if width % 128 == 0 and rows <= 32 else 64
    if num_tiles * triton.cdiv(num_columns, 128) < MANY_PROGRAMS:
        return 64, inner, 4
    return 128, inner, 3


@triton.jit
def _sum_choices(x_ptr, out_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(x_ptr + (token * TOP_K + i) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_choices(x: Tensor, top_k: int) -> Tensor:
    """x (S, H), contiguous -> (T, H): the sum of each token's rows, in float32."""
    num_rows, width = x.shape
    out = torch.empty(num_rows // top_k, width, dtype=x.dtype, device=x.device)
    block = min(512, triton.next_power_of_2(width))
    if num_rows:
        _sum_choices[(len(out), triton.cdiv(width, block))](x, out, top_k, width, block, num_warps=2)
    return out
