"""Faster forwards, with gradients, for the modules of a transformers model that computes on a CPU.

    RMSNorm, gated MLP, rotary embedding ─► their gradients in closed form: a few passes over memory where autograd takes many

In half precision the residual stream of a decoder is kept in float32, as `models/fused_layers.py` keeps it on CUDA: the embedding
gives it so, a norm gives what the weights are in, and sums with the stream stay in float32 by themselves.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.models.fused_layers import (
    gate_activation,
    is_plain_mlp,
    is_usual_layer,
    norm_eps,
    norm_offset,
    rotary_forward,
)

Forward = Callable[..., Any]


def fuse_on_host(model: nn.Module) -> list[str]:
    """Give the modules of `model` their faster forwards; returns the classes that got one."""
    fused: set[str] = set()
    verdicts: dict[type[nn.Module], Forward | None] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in verdicts:
            verdicts[kind] = _norm_forward(module) or _mlp_forward(module) or rotary_forward(module, _fits, _rotate)
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
        out: Tensor = RmsNorm.apply(x, self.weight, norm_eps(self), offset)
        return out

    return forward


class RmsNorm(torch.autograd.Function):
    """x / sqrt(mean x² + eps) times weight, or 1 + weight with `offset`; in the type of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(norm.new_tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
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
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward.default(
            grad, x.float(), x.shape[-1:], torch.zeros_like(scale), scale, factor, None, [True, True, False]
        )
        of_x.addcmul_((grad @ factor)[..., None], scale, value=1 / x.shape[-1])
        return of_x.to(x.dtype), of_weight, None, None


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}
"""Name to the function and to (gradient, its input, grad_input=where the input's gradient goes)."""


def _mlp_forward(module: nn.Module) -> Forward | None:
    activation = gate_activation(module)
    if activation is None:
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_plain_mlp(self):
            return type(self).forward(self, x)
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        out: Tensor = GatedMlp.apply(x, *weights, *ACTIVATIONS[activation])
        return out

    return forward


class GatedMlp(torch.autograd.Function):
    """down(activation(gate(x)) * up(x)) of three linear layers without bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        of_gate: Tensor,
        of_up: Tensor,
        of_down: Tensor,
        activation: Callable[[Tensor], Tensor],
        through_activation: Callable[..., Tensor],
    ) -> Tensor:
        gate, up = F.linear(x, of_gate), F.linear(x, of_up)
        opened = activation(gate)
        product = opened * up
        ctx.save_for_backward(x, of_gate, of_up, of_down, gate, up, opened, product)
        ctx.through_activation = through_activation
        return F.linear(product, of_down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        of_gate, of_up, of_down = saved[1:4]
        x, gate, up, opened, product, rows = (t.flatten(0, -2) for t in (saved[0], *saved[4:], grad))
        for_product = rows @ of_down
        for_up = opened.mul_(for_product)  # nobody else holds it
        for_gate = ctx.through_activation(for_product.mul_(up), gate, grad_input=for_product)
        for_x = (for_up @ of_up).addmm_(for_gate, of_gate)
        wants_gate, wants_up, wants_down = ctx.needs_input_grad[1:4]
        return (
            for_x.view_as(grad),
            (x.t() @ for_gate).t() if wants_gate else None,  # products of few rows are faster than of few columns
            (x.t() @ for_up).t() if wants_up else None,
            rows.t() @ product if wants_down else None,
            None,
            None,
        )


def _fits(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    return cos.dim() == 3 and cos.shape[-1] == q.shape[-1]


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)


class Rotation(torch.autograd.Function):
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
