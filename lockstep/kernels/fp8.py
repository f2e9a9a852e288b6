"""Products in 8 bits: a weight and the rows of its input as float8_e4m3fn, each row with its own float32 scale.

    x (..., K) ─► quantize ─► x8, sx (one scale per row)  ┐
    weight (N, K) ─► quantize ─► w8, sw (one per output)  ┴─► sx * (x8 w8^T) * sw + bias

A scale is the row's largest magnitude over 448, the largest number of the type; e4m3 has 3 bits of mantissa, so a number that is
not below 2^-6 of its scale is off by 1/16 of itself at most. `fp8_linear` runs on the tensor cores of GPUs that have the type
(compute capability 8.9 and later); elsewhere it is its definition in float32, which is slower than a product in 16 bits.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.packed import packed

DTYPE = torch.float8_e4m3fn
PRODUCT_DTYPE = torch.bfloat16
"""Of the inputs and outputs of the tensor cores' form."""
LARGEST = 448.0
LEAST_SCALE = 1e-12
"""Of a row of zeros."""
MULTIPLE = 16
"""The tensor cores' form takes widths that are multiples of it."""


class Fp8Rows(NamedTuple):
    """values * scales[:, None]. values: float8_e4m3fn (N, K); scales: float32 (N)."""

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        return self.values.float() * self.scales[:, None]


def empty_rows(num_rows: int, width: int, device: torch.device) -> Fp8Rows:
    return Fp8Rows(
        torch.empty(num_rows, width, dtype=DTYPE, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def joined(parts: Sequence[Fp8Rows]) -> Fp8Rows:
    """The rows of several weights as one; copied only if they are not adjacent in memory."""
    return Fp8Rows(packed([part.values for part in parts]), packed([part.scales for part in parts]))


def quantize(x: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """x (N, K) in 8 bits, written to `out` if given."""
    if out is None:
        out = empty_rows(x.shape[0], x.shape[1], x.device)
    if has_fp8_products(x.device):
        from lockstep.kernels.fp8_rows import quantize_rows

        quantize_rows(x, out.values, out.scales, 1 / LARGEST, LEAST_SCALE)
    else:
        quantize_reference(x, out)
    return out


def quantize_reference(x: Tensor, out: Fp8Rows) -> None:
    wide = x.float()
    out.scales.copy_((wide.abs().amax(-1) * (1 / LARGEST)).clamp_min(LEAST_SCALE))
    out.values.copy_(wide / out.scales[:, None])


def saturated(x: Tensor) -> Tensor:
    """x in 8 bits without scales: rounded to the nearest number of the type, beyond the largest to the largest."""
    return x.clamp(-LARGEST, LARGEST).to(DTYPE)


def fp8_linear(x: Tensor, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """x (..., K) -> (..., N) in the dtype of x, without gradients."""
    rows = quantize(x.reshape(-1, x.shape[-1]))
    if x.dtype == PRODUCT_DTYPE and _fits(weight) and has_fp8_products(x.device):
        scales = (rows.scales[:, None], weight.scales[None])
        out = torch._scaled_mm(
            rows.values, weight.values.t(), *scales, bias=bias, out_dtype=PRODUCT_DTYPE, use_fast_accum=True
        )
    else:
        out = fp8_linear_reference(rows, weight, bias).to(x.dtype)
    return out.view(*x.shape[:-1], len(weight.values))


def fp8_linear_reference(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """In float32."""
    out = F.linear(x.values.float(), weight.values.float()) * x.scales[:, None] * weight.scales
    return out if bias is None else out + bias.float()


def has_fp8_products(device: torch.device) -> bool:
    """Whether the device's tensor cores have the type."""
    return device.type == "cuda" and _capability(device.index) >= (8, 9)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _fits(weight: Fp8Rows) -> bool:
    return not any(size % MULTIPLE for size in weight.values.shape)
