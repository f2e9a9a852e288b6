"""Operations of a decoder layer other than its products (`kernels/linear.py`), forward and backward together.

    norm       of activations; `norm_stream` also returns the residual stream for the next addition
    rotary     position embedding of queries and keys
    take_rows  rows picked by index, any of them several times

Each has a reference in plain torch, which any device runs, and a Triton form for CUDA.
"""

from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.kernels.exact import is_exact

NormKind = Literal["rms", "rms_wide", "rms_offset", "layer"]
"""rms, rms_wide, rms_offset: `kernels/norm.py`; layer: mean subtracted, no bias, rounded after the weight (Cohere)."""

HALF = (torch.bfloat16, torch.float16)


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton and cuBLAS forms serve this tensor."""
    return x.is_cuda


# Norm


def norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """Over the last dimension (or the weight's dimensions), in the weight's dtype."""
    if on_gpu(x) and kind != "layer":
        out: Tensor = _RmsNorm.apply(x, weight, eps, kind, False)[0]
        return out
    return norm_reference(x, weight, eps, kind)


def norm_stream(stream: Tensor, weight: Tensor, eps: float, kind: NormKind) -> tuple[Tensor, Tensor]:
    """The norm of the residual stream, and the stream to add to: a copy if autograd still needs the original."""
    if on_gpu(stream) and kind != "layer" and torch.is_grad_enabled():
        out: tuple[Tensor, Tensor] = _RmsNorm.apply(stream, weight, eps, kind, True)
        return out
    return norm(stream, weight, eps, kind), stream


def norm_reference(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    wide = x.float()
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if kind == "rms":
        return weight * wide.to(weight.dtype)
    factor = 1.0 + weight.float() if kind == "rms_offset" else weight.float()
    return (wide * factor).to(weight.dtype)


class _RmsNorm(torch.autograd.Function):
    """The norm and, with `copies`, a copy of x whose gradient is added in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: NormKind, copies: bool
    ) -> tuple[Tensor, Tensor | None]:
        from lockstep.kernels.norm import rms_norm

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.kind = kind
        copy = torch.empty(x.shape, dtype=x.dtype, device=x.device) if copies else None
        return rms_norm(x, weight, eps, kind, copy_to=copy), copy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.norm import rms_norm_gradient

        x, weight = ctx.saved_tensors
        return *rms_norm_gradient(x, weight, grad, residual, ctx.eps, ctx.kind), None, None, None


# Rotary position embedding


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k (B, HK, T, D), cos and sin (B, T, R) with R <= D: the first R dimensions of each head are rotated.

    interleaved: the pairs are neighbours (Cohere) instead of the two halves.
    """
    if on_gpu(q) and not interleaved and cos.shape[-1] == q.shape[-1]:
        if len(q) == 1:
            out: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos, sin)
            return out
        if is_exact():  # as one row: the reference rounds twice
            joint_q, joint_k = (t.transpose(0, 1).flatten(1, 2)[None] for t in (q, k))
            cos, sin = (t.expand(len(q), -1, -1).flatten(0, 1)[None] for t in (cos, sin))
            turned_q, turned_k = (
                t[0].unflatten(1, (len(q), -1)).transpose(0, 1) for t in rotary(joint_q, joint_k, cos, sin)
            )
            return turned_q, turned_k
    both = rotary_reference(torch.cat((q, k), 1), cos, sin, interleaved)
    return both[:, : q.shape[1]], both[:, q.shape[1] :]


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    cos, sin, width = cos[:, None], sin[:, None], cos.shape[-1]
    turned = x[..., :width]
    halves = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(width // 2), slice(width // 2, None))
    first, second = ((..., half) for half in halves)
    out = turned * cos
    out[first].addcmul_(turned[second], sin[first], value=-1)
    out[second].addcmul_(turned[first], sin[second])
    out = out.to(x.dtype)
    return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), -1)


class _Rotary(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: sin with its halves swapped and negated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from lockstep.kernels import rotary

        ctx.save_for_backward(cos, sin)
        return rotary.rotary(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels import rotary

        cos, sin = ctx.saved_tensors
        back = -sin.roll(sin.shape[-1] // 2, -1)
        grad_q, grad_k = (g if g.stride(-1) == 1 else g.contiguous() for g in (grad_q, grad_k))
        return *rotary.rotary(grad_q, grad_k, cos, back), None, None


# Rows


class RowIndex:
    """Which of `num_rows` rows are taken, in order: (N)."""

    def __init__(self, index: Tensor, num_rows: int) -> None:
        self.index = index
        self.num_rows = num_rows

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """(N) where the copies of each row went, sorted by row, and (num_rows + 1) where each row's begin among them."""
        rows, places = self.index.sort(stable=True)
        bounds = torch.arange(self.num_rows + 1, device=rows.device)
        return places, torch.searchsorted(rows, bounds)


def take_rows(x: Tensor, rows: RowIndex) -> Tensor:
    """x (num_rows, ...) -> (N, ...). On CUDA the gradient of a row is summed in float32, always in the same order."""
    if not on_gpu(x):
        return x.index_select(0, rows.index)
    out: Tensor = _TakeRows.apply(x, rows)
    return out


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowIndex) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.gather import sum_rows

        return sum_rows(grad.contiguous(), *ctx.rows.places), None
