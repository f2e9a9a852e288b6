"""Linear layers whose product leaves the matrix unit in float32, instead of being rounded to the weights' half precision.

A logit near 16 in bfloat16 stands on a grid of 1/8: log-probs of the same token under the same weights then differ by percents
between two computations that differ in their last bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _LinearFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grad.t() @ x if ctx.needs_input_grad[1] else None


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., E) @ weight (V, E).T in float32; inputs in half precision on CUDA are multiplied as they are."""
    if not (x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)):
        return F.linear(x, weight).float()
    out: Tensor = _LinearFloat32.apply(x.flatten(0, -2), weight)
    return out.view(*x.shape[:-1], weight.shape[0])


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """total (..., E) += x (..., I) @ weight (E, I).T, in place and without rounding in between."""
    flat, rows = total.view(-1, total.shape[-1]), x.reshape(-1, x.shape[-1])
    if total.dtype == x.dtype:
        flat.addmm_(rows, weight.t())
    elif total.is_cuda:
        torch.addmm(flat, rows, weight.t(), out_dtype=total.dtype, out=flat)
    else:
        flat.add_(F.linear(rows.to(total.dtype), weight.to(total.dtype)))
    return total
