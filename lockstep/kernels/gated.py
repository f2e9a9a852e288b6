"""Triton kernels of the middle of a gated MLP, activation(gate) * up: one pass forward, one pass for the gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sigmoid(x, SILU: tl.constexpr):
    """s with activation(x) = x * s: silu, or gelu with its tanh approximation, 0.5 x (1 + tanh z) = x sigmoid(2 z)."""
    return 1.0 / (1.0 + tl.exp(-x if SILU else -1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = x * _sigmoid(x, SILU)
    tl.store(out_ptr + row * width + column, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, product_ptr, gate_stride, up_stride, out_stride, width,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = row * width + column
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s = _sigmoid(x, SILU)
    slope = s * (1.0 + x * (1.0 - s)) if SILU else s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    dtype = grad_gate_ptr.dtype.element_ty
    y = x * s
    tl.store(grad_gate_ptr + row * out_stride + column, (grad * up * slope).to(dtype), mask=inside)
    tl.store(grad_up_ptr + row * out_stride + column, (grad * y).to(dtype), mask=inside)
    tl.store(product_ptr + at, (y * up).to(dtype), mask=inside)


def gated_product(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up (T, 2 I), gate first -> activation(gate) * up (T, I)."""
    gate, up = gate_up.chunk(2, -1)
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    block = min(2048, triton.next_power_of_2(width))
    if rows:
        grid = (rows, triton.cdiv(width, block))
        _forward[grid](gate, up, out, gate.stride(0), up.stride(0), width, activation == "silu", block)
    return out


def gated_product_gradient(gate_up: Tensor, grad: Tensor, activation: str, product: Tensor) -> Tensor:
    """Gradient (T, 2 I) of gate_up from that of the product (T, I). product: receives the product; may be `grad` itself."""
    gate, up = gate_up.chunk(2, -1)
    rows, width = gate.shape
    grads = torch.empty(rows, 2 * width, dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        _gradient[(rows, triton.cdiv(width, block))](
            *(gate, up, grad, grads, grads[:, width:], product),
            *(gate.stride(0), up.stride(0), 2 * width, width, activation == "silu", block),
        )
    return grads
