"""Triton kernel that sums rows by index in float32: the gradient of a gather, without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_rows(x_ptr, places_ptr, starts_ptr, out_ptr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for i in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        place = tl.load(places_ptr + i)
        total += tl.load(x_ptr + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_rows(x: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """out[r] = sum of x[places[i]] for i from starts[r] to starts[r + 1]; x (N, ...) contiguous."""
    out = torch.empty(len(starts) - 1, *x.shape[1:], dtype=x.dtype, device=x.device)
    width = out[0].numel()
    columns = triton.next_power_of_2(width)
    warps = 1 if width <= 256 else 4
    _sum_rows[(len(out),)](x, places, starts, out, width, columns, num_warps=warps)
    return out
