"""Faster forwards, with gradients, for the modules of a transformers model that computes on a CPU.

    RMSNorm, rotary embedding ─► their gradients in closed form: a few passes over memory where autograd takes many

In half precision the residual stream of a decoder is kept in float32, as `models/fused_layers.py` keeps it on CUDA: the embedding
gives it so, a norm gives what the weights are in, and sums with the stream stay in float32 by themselves.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.models.fused_layers import is_usual_layer, norm_eps, norm_offset, rotary_forward

Forward = Callable[..., Any]


def fuse_on_host(model: nn.Module) -> list[str]:
    """Give the modules of `model` their faster forwards; returns the classes that got one."""
    fused: set[str] = set()
    verdicts: dict[type[nn.Module], Forward | None] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in verdicts:
            verdicts[kind] = _norm_forward(module) or rotary_forward(module, _fits, _rotate)
        forward = verdicts[kind]
        if forward is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = MethodType(forward, module)
            fused.add(kind.__name__)
    for module in model.modules():
        if _has_usual_stream(module):
            embedding: Any = module.embed_tokens
            embedding.__dict__["forward"] = MethodType(_wide_embedding, embedding)
    return sorted(fused)


def _has_usual_stream(decoder: Any) -> bool:
    parts: list[Any] = [getattr(decoder, name, None) for name in ("embed_tokens", "layers", "norm")]
    if not all(isinstance(part, nn.Module) for part in parts):
        return False
    embedding, layers, norm = parts
    return isinstance(embedding, nn.Embedding) and norm_offset(norm) is not None and all(map(is_usual_layer, layers))


def _wide_embedding(self: Any, ids: Tensor) -> Tensor:
    out: Tensor = type(self).forward(self, ids)
    return out.float()


def _norm_forward(module: nn.Module) -> Forward | None:
    offset = norm_offset(module)
    if offset is None:
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype not in (self.weight.dtype, torch.float32):
            return type(self).forward(self, x)
        out: Tensor = _RmsNorm.apply(x, self.weight, norm_eps(self), offset)
        return out

    return forward


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean x² + eps) times weight, or 1 + weight with `offset`; in the type of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_() / x.shape[-1] + eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.offset = offset
        normed = wide * scale
        if offset:
            return normed.mul_(1 + weight.float()).to(weight.dtype)
        return normed.mul_(weight) if weight.dtype == torch.float32 else normed.to(weight.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        factor, grad = weight.float() + 1 if ctx.offset else weight.float(), grad.float()
        # LayerNorm's gradient where the mean is 0, without what it takes off for a mean that moves with x
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x.float(), x.shape[-1:], torch.zeros_like(scale), scale, factor, None, [True, True, False]
        )
        of_x += (grad @ factor)[..., None] * (scale / x.shape[-1])
        return of_x.to(x.dtype), of_weight, None, None


def _fits(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    return cos.dim() == 3 and cos.shape[-1] == q.shape[-1]


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)


class _Rotation(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, -1)
        out = x * cos
        low, high = out.chunk(2, -1)
        of_low, of_high = sin.chunk(2, -1)
        low.addcmul_(second, of_low, value=-1)
        high.addcmul_(first, of_high)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        first, second = grad.chunk(2, -1)
        out = grad * cos
        low, high = out.chunk(2, -1)
        of_low, of_high = sin.chunk(2, -1)
        low.addcmul_(second, of_high)
        high.addcmul_(first, of_low, value=-1)
        return out.to(grad.dtype), None, None
