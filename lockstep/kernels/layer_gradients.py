"""The layer kernels of the rollout with gradients, for training: the forward passes are the very ones of norms, gated and rotary.

    rms_norm:      saves its input; one pass gives the gradients of input and weight
    stream_norm:   the same of a residual stream, of which it makes a copy too; the gradient of that is added in the same pass
    gated_mlp:     one product for gate and up, which it saves; what they give is computed again in the pass of their gradients
    rotary:        saves cos and sin; the gradient of a rotation is the rotation back
    joint_linear:  linear layers of one input as one product, forward and backward
    add_product:   a linear layer whose result is added to a residual stream, in place and without being rounded before
    take_rows:     rows picked by index, any of them many times; their gradients are added up in float32
    embed_wide:    token embeddings in float32

Weights of one product that lie side by side are used as they lie, others are copied together (`kernels/joined.py`).
A residual stream may be in float32 beside weights in half precision. Gradients of weights are computed in float32 where a parameter
sums them so (`grad_dtype`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.kernels import gated, head, norms
from lockstep.kernels import rotary as rotation
from lockstep.kernels.gated import Activation
from lockstep.kernels.joined import together

NORM_PROGRAMS = 1024
"""Programs that share the rows of a norm's gradient, each with its own sum for the weight: a few for each multiprocessor."""


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_gradient(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    grad_x_ptr: tl.tensor,
    grad_weight_ptr: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
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
        grad_weight += grad * (x if OFFSET else x.to(rounded).to(tl.float32))
        grad = grad * weight[None, :]
        grad_x = (grad - x * (tl.sum(grad * x, 1) / WIDTH)[:, None]) * scale
        if residual_ptr is not None:
            grad_x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    place = grad_weight_ptr + tl.program_id(0) * WIDTH + column
    tl.store(place, tl.sum(grad_weight, 0), mask=column < WIDTH)


def _norm_gradient(
    x: Tensor, weight: Tensor, grad: Tensor, residual: Tensor | None, eps: float, offset: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, that of x with `residual` added."""
    x, grad, residual = x.contiguous(), grad.contiguous(), None if residual is None else residual.contiguous()
    width = x.shape[-1]
    num_rows, columns = x.numel() // width, triton.next_power_of_2(width)
    rows = max(1, 2048 // columns)
    programs = max(1, min(NORM_PROGRAMS, triton.cdiv(num_rows, rows)))
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_gradient[(programs,)](
        x,
        weight,
        grad,
        residual,
        grad_x,
        grad_weight,
        num_rows,
        eps,
        width,
        columns,
        rows,
        offset,
        num_warps=4 if columns <= 4096 else 8,
    )
    return grad_x, grad_weight.sum(0)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return norms.rms_norm(x, weight, eps, offset=offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_norm_gradient(x, weight, grad, None, ctx.eps, ctx.offset), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: bool) -> Tensor:
    """`norms.rms_norm` with gradients."""
    out: Tensor = _RmsNorm.apply(x, weight, eps, offset)
    return out


class _StreamNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(stream, weight)
        ctx.eps, ctx.offset = eps, offset
        copy = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        return norms.rms_norm(stream, weight, eps, offset=offset, copy_to=copy), copy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, residual: Tensor) -> tuple[Tensor | None, ...]:
        stream, weight = ctx.saved_tensors
        return *_norm_gradient(stream, weight, grad, residual, ctx.eps, ctx.offset), None, None


def stream_norm(stream: Tensor, weight: Tensor, eps: float, *, offset: bool) -> tuple[Tensor, Tensor]:
    """The norm of a residual stream, and a copy of the stream for what is added to it next."""
    out: tuple[Tensor, Tensor] = _StreamNorm.apply(stream, weight, eps, offset)
    return out


@triton.jit
def _gated_gradient(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    grad_gate_ptr: tl.tensor,
    grad_up_ptr: tl.tensor,
    product_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = row * width + column
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        s = 1.0 / (1.0 + tl.exp(-x))
        slope = s * (1.0 + x * (1.0 - s))
    else:  # x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x³)
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    dtype = grad_gate_ptr.dtype.element_ty
    y = x * s
    tl.store(grad_gate_ptr + row * out_stride + column, (grad * up * slope).to(dtype), mask=inside)
    tl.store(grad_up_ptr + row * out_stride + column, (grad * y).to(dtype), mask=inside)
    if product_ptr is not None:
        tl.store(product_ptr + at, (y * up).to(dtype), mask=inside)


def _through_gate(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation, product: Tensor | None) -> Tensor:
    """Gradients of gate and up (T, I) side by side (T, 2 I), from that of their product.

    product: gets activation(gate) * up; may be `grad` itself.
    """
    rows, width = gate.shape
    grads = torch.empty(rows, 2 * width, dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        _gated_gradient[(rows, triton.cdiv(width, block))](
            gate,
            up,
            grad,
            grads,
            grads[:, width:],
            product,
            gate.stride(0),
            up.stride(0),
            2 * width,
            width,
            activation == "silu",
            block,
        )
    return grads


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gated.gated_product(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (t.flatten(0, -2) for t in ctx.saved_tensors)
        both = _through_gate(gate, up, grad.flatten(0, -2).contiguous(), ctx.activation, None)
        return *(g.view(grad.shape) for g in both.chunk(2, -1)), None


def gated_product(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """`gated.gated_product` with gradients."""
    out: Tensor = _GatedProduct.apply(gate, up, activation)
    return out


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        stream: Tensor | None,
        activation: Activation,
    ) -> Tensor:
        both = F.linear(x, together((gate_weight, up_weight)))
        ctx.save_for_backward(x, both, gate_weight, up_weight, down_weight)
        ctx.activation, ctx.dtype = activation, _gradient_dtype(gate_weight)
        gate, up = both.chunk(2, -1)
        product = gated.gated_product(gate, up, activation)
        if stream is None:
            return F.linear(product, down_weight)
        ctx.mark_dirty(stream)
        return head.add_product(stream, product, down_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, both, gate_weight, up_weight, down_weight = ctx.saved_tensors
        shape, grad_stream = x.shape, grad if ctx.needs_input_grad[4] else None
        x, both, grad = (t.flatten(0, -2) for t in (x, both, grad.to(x.dtype)))
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad[:4]
        product = grad_product = grad @ down_weight
        gate, up = both.chunk(2, -1)
        grads = _through_gate(gate, up, grad_product, ctx.activation, product)
        of_both: Sequence[Tensor | None] = (None, None)
        if wants_gate or wants_up:
            of_both = _weight_gradient(grads, x, ctx.dtype).chunk(2)
        return (
            (grads @ together((gate_weight, up_weight))).view(shape) if wants_x else None,
            of_both[0] if wants_gate else None,
            of_both[1] if wants_up else None,
            _weight_gradient(grad, product, ctx.dtype) if wants_down else None,
            grad_stream,
            None,
        )


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: Activation,
    stream: Tensor | None = None,
) -> Tensor:
    """down(activation(gate(x)) * up(x)) of three linear layers without bias; keeps gate and up, not their product.

    stream: a residual stream to which it is added, in place and without being rounded before.
    """
    out: Tensor = _GatedMlp.apply(x, gate_weight, up_weight, down_weight, stream, activation)
    return out


_BACK = WeakTensorKeyDictionary()
"""For the sin of a forward pass, which all its layers share: the sin of the rotation back."""


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if sin not in _BACK:
            _BACK[sin] = -sin.roll(sin.shape[-1] // 2, -1)
        ctx.save_for_backward(cos, _BACK[sin])
        return rotation.rotary(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = (g if g.stride(-1) == 1 else g.contiguous() for g in (grad_q, grad_k))
        return *rotation.rotary(grad_q, grad_k, *ctx.saved_tensors), None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary.rotary` with gradients of q and k."""
    out: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos, sin)
    return out


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:number], parameters[number:]
        ctx.save_for_backward(x, *parameters)
        ctx.sizes = [len(weight) for weight in weights if weight is not None]
        ctx.dtype = _gradient_dtype(weights[0])
        joint = F.linear(x, together(weights), None if biases[0] is None else together(biases))  # type: ignore[arg-type]
        *parts, last = joint.split(ctx.sizes, -1)
        # the last part is the values: attention keeps them for its gradient, and as a view they would keep everything
        return *parts, last.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        number = len(ctx.sizes)
        weights = parameters[:number]
        wants_x, _, *wants = ctx.needs_input_grad
        grad = torch.cat(grads, -1).flatten(0, -2)
        of_x = (grad @ together(weights)).view(x.shape) if wants_x else None
        parts: list[Tensor | None] = [None] * (2 * number)
        if any(wants[:number]):
            parts[:number] = _weight_gradient(grad, x.flatten(0, -2), ctx.dtype).split(ctx.sizes)
        if any(wants[number:]):
            parts[number:] = grad.sum(0, dtype=ctx.dtype).split(ctx.sizes)
        return of_x, None, *(part if want else None for part, want in zip(parts, wants))


def joint_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """What linear layers with these weights and biases (all or none) give for x, from one product."""
    out: tuple[Tensor, ...] = _JointLinear.apply(x, len(weights), *weights, *biases)
    return out


class _AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = _gradient_dtype(weight)
        ctx.mark_dirty(stream)
        return head.add_product(stream, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_stream, wants_x, wants_weight = ctx.needs_input_grad
        half = grad.to(x.dtype).flatten(0, -2)
        return (
            grad if wants_stream else None,
            (half @ weight).view(x.shape) if wants_x else None,
            _weight_gradient(half, x.flatten(0, -2), ctx.dtype) if wants_weight else None,
        )


def add_product(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`head.add_product` with gradients."""
    out: Tensor = _AddProduct.apply(stream, x, weight)
    return out


@triton.jit
def _sum_places(
    grad_ptr: tl.tensor,
    places_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for i in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        place = tl.load(places_ptr + i)
        total += tl.load(grad_ptr + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * WIDTH + column
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


class RowIndex:
    """Which of `num_rows` rows are taken, in order: (N). skipped: a row without gradient."""

    def __init__(self, index: Tensor, num_rows: int, *, skipped: int | None = None) -> None:
        self.index, self.num_rows, self.skipped = index, num_rows, skipped

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """(N) where the rows went, those of one row together, and (num_rows + 1) where each row's begin among them."""
        rows, places = self.index.sort(stable=True)
        bounds = torch.arange(self.num_rows + 1, device=rows.device)
        return places, torch.searchsorted(rows, bounds)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowIndex, dtype: torch.dtype) -> Tensor:
        ctx.rows, ctx.dtype = rows, _gradient_dtype(x)
        return x.index_select(0, rows.index).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, rows = grad.contiguous(), ctx.rows
        out = torch.empty(rows.num_rows, *grad.shape[1:], dtype=ctx.dtype, device=grad.device)
        width = out[0].numel()
        _sum_places[(rows.num_rows,)](
            grad, *rows.places, out, width, triton.next_power_of_2(width), num_warps=1 if width <= 256 else 4
        )
        if rows.skipped is not None:
            out[rows.skipped].zero_()
        return out, None, None


def take_rows(x: Tensor, rows: RowIndex, dtype: torch.dtype | None = None) -> Tensor:
    """x (num_rows, ...) -> (N, ...), in another type if asked. A row's gradient is added up in float32, in one order."""
    out: Tensor = _TakeRows.apply(x, rows, dtype or x.dtype)
    return out


def embed_wide(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """ids (...), weight (V, H) -> (..., H) in float32. padding: an id whose row gets no gradient."""
    out = take_rows(weight, RowIndex(ids.flatten(), len(weight), skipped=padding), torch.float32)
    return out.view(*ids.shape, -1)


def _gradient_dtype(parameter: Tensor | None) -> torch.dtype:
    """In which the parameter's gradient is summed. To be asked in the forward: what checkpointing gives back later is a copy."""
    assert parameter is not None
    wide = parameter.is_leaf and getattr(parameter, "grad_dtype", None) == torch.float32
    return torch.float32 if wide else parameter.dtype


def _weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad (T, O).T @ x (T, I) in the given type."""
    if x.is_cuda and x.dtype != dtype:
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return grad.t() @ x
