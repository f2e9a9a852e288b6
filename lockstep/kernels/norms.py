"""Root-mean-square normalisation in one pass, rounded where transformers' modules round, to the weight's type.

plain:  weight * (x / rms(x)).to(dtype)            (Llama, Qwen, Mistral, ...)
offset: (x / rms(x) * (1 + weight)).to(dtype)      (Gemma)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    copy_ptr: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    stride_outer: tl.tensor,
    stride_inner: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    place = (row // inner).to(tl.int64) * stride_outer + (row % inner) * stride_inner
    x = tl.load(x_ptr + place[:, None] + column[None, :], mask=inside, other=0.0)
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if copy_ptr is not None:
        tl.store(copy_ptr + at, x, mask=inside)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    dtype = out_ptr.dtype.element_ty
    factor = weight.to(tl.float32)[None, :]
    y = x * (1.0 + factor) if OFFSET else x.to(dtype).to(tl.float32) * factor
    tl.store(out_ptr + at, y.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: bool = False, copy_to: Tensor | None = None) -> Tensor:
    """Over the last dimension; the result is contiguous, in the weight's type.

    offset: the weight is one less than the factor. copy_to: contiguous, becomes equal to x.
    """
    width = x.shape[-1]
    if x.dim() == 4 and x.shape[0] == 1 and x.stride(-1) == 1:  # heads of tokens, maybe a part of a wider product
        inner, stride_outer, stride_inner = x.shape[2], x.stride(1), x.stride(2)
    else:
        x = x.contiguous()
        inner, stride_outer, stride_inner = 1, width, 0
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    num_rows = x.numel() // width
    columns = triton.next_power_of_2(width)
    rows = max(1, 2048 // columns)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        out,
        copy_to,
        num_rows,
        inner,
        stride_outer,
        stride_inner,
        eps,
        width,
        columns,
        rows,
        offset,
        num_warps=4 if columns <= 4096 else 8,
    )
    return out
