"""Triton kernel of `kernels/fp8.py`: rows in 8 bits, in two passes over each row, of which the second reads the cache."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _quantize(
    x_ptr, values_ptr, scales_ptr, stride, width,
    FACTOR: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + columns
        x = tl.load(x_ptr + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.maximum(tl.max(largest, 0) * FACTOR, LEAST)
    tl.store(scales_ptr + row, scale)
    for begin in range(0, width, BLOCK):
        at = begin + columns
        x = tl.load(x_ptr + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(values_ptr + row * width + at, tl.div_rn(x, scale).to(values_ptr.dtype.element_ty), mask=at < width)


def quantize_rows(x: Tensor, values: Tensor, scales: Tensor, factor: float, least: float) -> None:
    """x (N, K) -> float8 values (N, K) and float32 scales (N): a row's largest magnitude times `factor`, but not below `least`."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    block = min(4096, triton.next_power_of_2(width))
    if rows:
        _quantize[(rows,)](x, values, scales, x.stride(0), width, factor, least, block, num_warps=8)
