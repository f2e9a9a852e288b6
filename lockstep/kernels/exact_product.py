"""A matrix product on CUDA whose rows do not depend on each other. cuBLAS chooses kernel and order of the sum by the number of rows.

The inner dimension is cut into parts, by the shape of the weight alone. Each part is summed from its first entry to its last, and
the parts are added in their order:

    many rows   a program per tile of the result computes part after part
    few rows    a program per tile and part, which fills the device; a second kernel adds the parts

Both give the same bits, and so do tiles of different sizes, which `exact.py` tries on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Of the result, and how a program computes it.

    inner:  entries of the inner dimension per iteration.
    stages: iterations whose operands are loaded ahead.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


MANY_ROWS = 512
"""From this many rows on, tiles are large. The steps of decoding have fewer: small tiles occupy more multiprocessors."""
LARGE = Tile(128, 128, 64, 8, 3)
SMALL = Tile(64, 64, 64, 4, 3)
SINGLE = Tile(64, 64, 64, 4, 2)
"""In single precision."""
MAX_PARTS = 4
PART_STEP = 128
"""The length of a part is a multiple of this, and so of `inner` of all tiles."""
JOINED = 512
"""Entries that a program of `_join` adds up."""
NUM_TILES = 128
"""Tiles of one row of tiles, over all parts, that weights of few columns are cut into: about as many as multiprocessors."""


@triton.jit
def _finished(total, add_at, scale, inside, ADD: tl.constexpr):
    """The product, or what it is added to plus `scale` times the product."""
    if ADD:
        total = tl.fma(total, scale, tl.load(add_at, mask=inside, other=0.0).to(tl.float32))
    return total


@triton.jit
def _add_part(
    total, x_at, weight_at, length,
    WIDTH: tl.constexpr, PART: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total + the product over the next `length` entries."""
    k = tl.arange(0, INNER)
    for start in range(0, length, INNER):
        if WIDTH % INNER == 0:
            x = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            x = tl.load(x_at, mask=(start + k < length)[None, :], other=0.0)
            weight = tl.load(weight_at, mask=(start + k < length)[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        x_at += INNER
        weight_at += INNER
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr, weight_ptr, out_ptr, add_ptr, num_rows, num_columns, x_stride, weight_stride, out_stride, scale,
    WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # programs of GROUP neighbouring tiles of rows follow each other, so that they find the weights in the cache
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    place = program % (GROUP * column_tiles)
    row = (first + place % size) * ROWS + tl.arange(0, ROWS)
    column = place // size * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    # rows beyond the last repeat it: they are not stored
    x_at = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + tl.minimum(column, num_columns - 1).to(tl.int64)[None, :] * weight_stride + k[:, None]
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SPLIT:
        begin = tl.program_id(1) * PART
        length = tl.minimum(PART, WIDTH - begin)
        total = _add_part(zero, x_at + begin, weight_at + begin, length, WIDTH, PART, INNER, PRECISION)
        at = (tl.program_id(1).to(tl.int64) * num_rows + row)[:, None] * num_columns + column[None, :]
        tl.store(out_ptr + at, total, mask=inside)
    else:
        total = zero
        for begin in range(0, WIDTH, PART):
            length = tl.minimum(PART, WIDTH - begin)
            total += _add_part(zero, x_at + begin, weight_at + begin, length, WIDTH, PART, INNER, PRECISION)
        at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
        total = _finished(total, add_ptr + at, scale, inside, ADD)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _join(
    parts_ptr, out_ptr, add_ptr, num_rows, num_columns, out_stride, scale,
    PARTS: tl.constexpr, ADD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    total = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + (part * num_rows.to(tl.int64) + row) * num_columns + column, mask=inside)
    at = row * out_stride + column
    total = _finished(total, add_ptr + at, scale, inside, ADD)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def part_length(num_columns: int, width: int) -> int:
    """Entries of a part of the inner dimension, whatever the number of rows."""
    parts = min(MAX_PARTS, max(1, NUM_TILES // triton.cdiv(num_columns, LARGE.columns)))
    return triton.cdiv(triton.cdiv(width, parts), PART_STEP) * PART_STEP


def product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    add_to: Tensor | None = None,
    scale: float = 1.0,
    tile: Tile | None = None,
) -> Tensor:
    """x (T, I) @ weight (O, I).T in `dtype`, summed in float32.

    add_to: (T, O) of that dtype, to which `scale` times the product is added in place.
    tile:   None chooses one by the number of rows.
    """
    assert x.dtype == weight.dtype, "operands of different types"
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    num_rows, width = x.shape
    num_columns = len(weight)
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device) if add_to is None else add_to
    assert out.dtype == dtype and out.stride(1) == 1, "the sum has another type or layout"
    if not num_rows:
        return out
    half = x.dtype != torch.float32
    tile = tile or (SINGLE if not half else LARGE if num_rows >= MANY_ROWS else SMALL)
    part = part_length(num_columns, width)
    parts = triton.cdiv(width, part)
    splits = parts if num_rows < MANY_ROWS else 1
    target = out if splits == 1 else torch.empty(splits, num_rows, num_columns, dtype=torch.float32, device=x.device)
    adds = add_to is not None
    _product[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns), splits)](
        *(x, weight, target, out, num_rows, num_columns, x.stride(0), weight.stride(0), out.stride(0), scale),
        *(width, part, tile.rows, tile.columns, tile.inner, 8, splits > 1, adds and splits == 1),
        "tf32" if half else "ieee",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        grid = (num_rows, triton.cdiv(num_columns, JOINED))
        _join[grid](target, out, out, num_rows, num_columns, out.stride(0), scale, splits, adds, JOINED, num_warps=2)
    return out
