"""A matrix product on CUDA whose rows do not depend on each other: one program per tile of the result, which sums over the inner
dimension from its first entry to its last, `inner` of its tile at a time. cuBLAS chooses kernel and order by the number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Of the result, and how a program computes it. All tiles in use must give the same bits, which `exact.py` tries.

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


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr, weight_ptr, out_ptr, num_rows, num_columns, x_stride, weight_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
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
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, INNER):
        if WIDTH % INNER == 0:
            x = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            x = tl.load(x_at, mask=(start + k < WIDTH)[None, :], other=0.0)
            weight = tl.load(weight_at, mask=(start + k < WIDTH)[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        x_at += INNER
        weight_at += INNER
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def product(x: Tensor, weight: Tensor, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """x (T, I) @ weight (O, I).T in `dtype`, summed in float32. tile: None chooses one by the number of rows."""
    assert x.dtype == weight.dtype, "operands of different types"
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    num_rows, width = x.shape
    num_columns = len(weight)
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    half = x.dtype != torch.float32
    tile = tile or (SINGLE if not half else LARGE if num_rows >= MANY_ROWS else SMALL)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns),)
    _product[grid](
        *(x, weight, out, num_rows, num_columns, x.stride(0), weight.stride(0)),
        *(width, tile.rows, tile.columns, tile.inner, 8, "tf32" if half else "ieee"),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
