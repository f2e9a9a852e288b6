"""The middle of a gated MLP, activation(gate) * up, in one pass, rounded once at its end."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@triton.jit
def _gated(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    width: tl.tensor,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    # 0.5 x (1 + tanh z) = x sigmoid(2 z)
    y = x / (1.0 + tl.exp(-x if SILU else -1.5957691216057308 * (x + 0.044715 * x * x * x)))
    tl.store(out_ptr + row * width + column, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated_product(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """gate, up: (..., I), rows of the last two dimensions at any stride (halves of one product, say)."""
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, block = gate.numel() // width, min(2048, triton.next_power_of_2(width))
    flat_gate, flat_up = gate.view(rows, width), up.view(rows, width)
    _gated[(rows, triton.cdiv(width, block))](
        flat_gate, flat_up, out, flat_gate.stride(0), flat_up.stride(0), width, activation == "silu", block
    )
    return out
