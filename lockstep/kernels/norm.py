"""Triton kernels of root-mean-square normalisation: one pass forward, one pass for the gradients of input and weight.

rms:         weight * (x / rms(x)).to(dtype)        rounded before the weight (Llama, Qwen, Mistral)
rms_wide:    (weight * x / rms(x)).to(dtype)        rounded after it (OLMo 2, GPT-OSS)
rms_offset:  ((1 + weight) * x / rms(x)).to(dtype)  (Gemma)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 1024
"""Programs of the gradient kernel, each with its own partial sum for the weight's gradient: a few per multiprocessor."""


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_ptr, weight_ptr, out_ptr, copy_ptr, num_rows, inner, stride_outer, stride_inner, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    place = (row // inner).to(tl.int64) * stride_outer + (row % inner) * stride_inner
    x = tl.load(x_ptr + place[:, None] + column[None, :], mask=inside, other=0.0)
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if copy_ptr is not None:
        tl.store(copy_ptr + at, x, mask=inside)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    x = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    dtype = out_ptr.dtype.element_ty
    if OFFSET:
        weight += 1.0
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (x * weight).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gradient(
    x_ptr, weight_ptr, grad_ptr, residual_ptr, grad_x_ptr, grad_weight_ptr, num_rows, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if OFFSET:
        weight += 1.0
    rounded = grad_ptr.dtype.element_ty
    grad_weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x = x * scale
        grad_weight += grad * (x.to(rounded).to(tl.float32) if ROUND_FIRST else x)
        grad = grad * weight[None, :]
        grad_x = (grad - x * (tl.sum(grad * x, 1) / WIDTH)[:, None]) * scale
        if residual_ptr is not None:
            grad_x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    place = grad_weight_ptr + tl.program_id(0) * WIDTH + column
    tl.store(place, tl.sum(grad_weight, 0), mask=column < WIDTH)


def _tiling(width: int) -> tuple[int, int, int]:
    """Columns and rows of a program's tile, and its warps."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, 2048 // columns), 4 if columns <= 4096 else 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: str, copy_to: Tensor | None = None) -> Tensor:
    """Over the last dimension; contiguous, in the weight's dtype. copy_to: contiguous, receives a copy of x."""
    width = x.shape[-1]
    if x.dim() == 4 and x.shape[0] == 1 and x.stride(-1) == 1:  # heads of tokens, possibly views of a wider product
        inner, stride_outer, stride_inner = x.shape[2], x.stride(1), x.stride(2)
    else:
        x = x.contiguous()
        inner, stride_outer, stride_inner = 1, width, 0
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    num_rows = x.numel() // width
    columns, rows, warps = _tiling(width)
    _forward[(triton.cdiv(num_rows, rows),)](
        *(x, weight, out, copy_to, num_rows, inner, stride_outer, stride_inner, eps),
        *(width, columns, rows, kind == "rms_offset", kind == "rms"),
        num_warps=warps,
    )
    return out


def rms_norm_gradient(
    x: Tensor, weight: Tensor, grad: Tensor, residual: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Gradients of x, with `residual` added, and of the weight in float32."""
    x = x.contiguous()
    grad = grad.contiguous()
    residual = None if residual is None else residual.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    columns, rows, warps = _tiling(width)
    programs = max(1, min(MAX_PROGRAMS, triton.cdiv(num_rows, rows)))
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _gradient[(programs,)](
        *(x, weight, grad, residual, grad_x, grad_weight, num_rows, eps),
        *(width, columns, rows, kind == "rms_offset", kind == "rms"),
        num_warps=warps,
    )
    return grad_x, grad_weight.sum(0)
