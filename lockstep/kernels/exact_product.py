"""A matrix product on CUDA whose rows do not depend on each other: one program per tile of the result, which sums over the inner
dimension from its first entry to its last. cuBLAS chooses kernel and order by the number of rows.

Tiles of all sizes give the same bits, which `exact.py` tries on the device. So few rows, as in decoding, get small tiles, which
occupy more multiprocessors, and many get large ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """The part of the result that a program computes, and how it does.

    inner:       entries of the inner dimension per iteration.
    stages:      iterations whose operands are loaded ahead.
    descriptors: whether the device's copy engine loads operands, by descriptors of x and of the weight (from Hopper on).
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    descriptors: bool = False


HOPPER = (Tile(128, 256, 64, 8, 4, True), Tile(128, 128, 64, 8, 4, True), Tile(64, 64, 128, 4, 4, True))
"""Largest first. They need 192 KiB of shared memory, which Hopper and the Blackwell of data centers have."""
OTHERS = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 3))
SINGLE = (Tile(64, 64, 64, 4, 2),)
"""In single precision."""
MIN_TILES = 264
"""Tiles of a result that keep a device busy: two per multiprocessor of an H200."""
ALIGNMENT = 16
"""Of rows in memory, in bytes, for descriptors."""


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_columns, x_stride, weight_stride, out_stride, scale,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, DESCRIPTORS: tl.constexpr,
    GROUP: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # programs of GROUP neighbouring tiles of rows follow each other, so that they find the weights in the cache
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    place = program % (GROUP * column_tiles)
    first_row = (first + place % size) * ROWS
    first_column = place // size * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if DESCRIPTORS:  # entries beyond x and the weight are zero
        for start in range(0, WIDTH, INNER):
            x = x_ptr.load([first_row, start])
            weight = weight_ptr.load([first_column, start])
            total = tl.dot(x, weight.T, total, input_precision=PRECISION)
    else:
        k = tl.arange(0, INNER)
        # rows beyond the last repeat it: they are not stored
        x_at = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
        weight_at = weight_ptr + tl.minimum(column, num_columns - 1).to(tl.int64)[None, :] * weight_stride + k[:, None]
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
    out_at = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)
        # a sum after a single iteration would become the start of its dot, in tiles of that inner size alone
        total = tl.fma(total, 1.0, tl.broadcast_to(bias[None, :], [ROWS, COLUMNS]))
    if ADD:
        total = tl.fma(total, scale, tl.load(out_at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)


def product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
    scale: float = 1.0,
    tile: Tile | None = None,
) -> Tensor:
    """x (T, I) @ weight (O, I).T + bias (O) in `dtype`, summed in float32.

    add_to: (T, O) of that dtype, to which `scale` times the product is added in place.
    tile:   None chooses one by the size of the result.
    """
    assert x.dtype == weight.dtype, "operands of different types"
    (num_rows, width), num_columns = x.shape, len(weight)
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device) if add_to is None else add_to
    assert out.dtype == dtype and out.stride(1) == 1, "the sum has another type or layout"
    if not num_rows:
        return out
    half = x.dtype != torch.float32
    tile = tile or _tile(_tiles(x.device) if half else SINGLE, num_rows, num_columns)
    x, weight = (_aligned(t) if tile.descriptors or t.stride(1) != 1 else t for t in (x, weight))
    operands: list[Tensor | TensorDescriptor] = [x, weight]
    if tile.descriptors:
        operands = [
            TensorDescriptor.from_tensor(t, [size, tile.inner]) for t, size in ((x, tile.rows), (weight, tile.columns))
        ]
    _product[(_num_tiles(tile, num_rows, num_columns),)](
        *(*operands, bias, out, num_rows, num_columns, x.stride(0), weight.stride(0), out.stride(0), scale),
        *(width, tile.rows, tile.columns, tile.inner, tile.descriptors, 8, add_to is not None),
        "tf32" if half else "ieee",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def by_all_tiles(x: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """The product in float32 by each of the tiles that this device may use."""
    for tile in _tiles(x.device):
        yield product(x, weight, torch.float32, tile=tile)


@cache
def _tiles(device: torch.device) -> tuple[Tile, ...]:
    with_descriptors = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return HOPPER if with_descriptors else OTHERS


def _tile(tiles: Sequence[Tile], num_rows: int, num_columns: int) -> Tile:
    """The largest of which the result has enough, or else the smallest."""
    large = (tile for tile in tiles if _num_tiles(tile, num_rows, num_columns) >= MIN_TILES)
    return next(large, tiles[-1])


def _num_tiles(tile: Tile, num_rows: int, num_columns: int) -> int:
    return triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)


def _aligned(x: Tensor) -> Tensor:
    """x (T, I) in rows that begin at multiples of `ALIGNMENT`; a copy, padded with zeros, if they do not."""
    entries = ALIGNMENT // x.itemsize
    if x.stride(1) == 1 and x.stride(0) % entries == 0 and x.data_ptr() % ALIGNMENT == 0:
        return x
    out = x.new_zeros(len(x), -(-x.shape[1] // entries) * entries)
    out[:, : x.shape[1]] = x
    return out
