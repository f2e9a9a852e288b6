"""The linear layers of a decoder layer, forward and backward together.

    joint_linear    several linear layers with the same input as one product
    add_linear      residual stream + linear(x)
    gated_linear    down(activation(gate) * up), optionally added to the residual stream
    linear          one product with a weight
    linear_float32  a product whose result is not rounded to half precision (the vocabulary head)

Each has a reference in plain torch, which any device runs, and a Triton or cuBLAS form for CUDA. The residual stream may be in
float32 with weights in half precision: adding to it inside the product saves one rounding per addition. Gradients of weights are
computed in float32 if the parameter accumulates them in float32 (`grad_dtype`).

A linear layer may have a LoRA adapter of peft: x W^T + scale * (x A^T) B^T, with the base still part of the joint product. Any
other module in the place of an `nn.Linear` keeps its own forward. In exact mode (`kernels/exact.py`) forward products are
exact. Without gradients a layer's 8-bit weight (`set_fp8_weight`) replaces its own.
"""

import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.kernels.exact import exact_activation, exact_product, is_exact
from lockstep.kernels.fp8 import Fp8Rows, fp8_linear, joined
from lockstep.kernels.ops import HALF, on_gpu
from lockstep.kernels.packed import packed

Activation = Literal["silu", "gelu_tanh"]


# Modules, their adapters and 8-bit weights


def is_plain(*modules: nn.Module) -> bool:
    """Whether these are linear layers without adapters or quantisation."""
    return all(type(module) is nn.Linear for module in modules)


class Adapter(NamedTuple):
    """LoRA: scale * (x A^T) B^T is added to a layer's output. a (R, I), b (O, R)."""

    a: Tensor
    b: Tensor
    scale: float


def linear_and_adapter(module: nn.Module) -> tuple[nn.Linear, Adapter | None] | None:
    """A linear layer and its adapter, None if it has none or it is off; None for a module that must be called instead."""
    if type(module) is nn.Linear:
        return module, None
    lora: Any = sys.modules.get("peft.tuners.lora.layer")  # without it nothing has an adapter
    if lora is None or type(module) is not lora.Linear or not is_plain(module.base_layer):  # type: ignore[arg-type]
        return None
    layer: Any = module
    if layer.disable_adapters:
        return layer.base_layer, None
    (name,) = layer.active_adapters
    return layer.base_layer, Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


_FP8_WEIGHT = "lockstep_fp8_weight"


def set_fp8_weight(linear: nn.Linear, weight: Fp8Rows | None) -> None:
    """Let products without gradients use this weight instead of the layer's own; None ends that."""
    linear.__dict__[_FP8_WEIGHT] = weight


def _fp8_weights(linears: Sequence[nn.Linear]) -> list[Fp8Rows]:
    """The 8-bit weights that serve these layers now: of all of them, or none."""
    if torch.is_grad_enabled():
        return []
    weights: list[Fp8Rows | None] = [linear.__dict__.get(_FP8_WEIGHT) for linear in linears]
    found = [weight for weight in weights if weight is not None]
    return found if len(found) == len(linears) else []


# Layers


def joint_linear(x: Tensor, modules: Sequence[nn.Module]) -> Tensor:
    """The outputs of linear layers with the same input, concatenated: (..., sum of their sizes)."""
    found = [linear_and_adapter(module) for module in modules]
    linears = [pair[0] for pair in found if pair is not None]
    if len(linears) < len(modules) or len({linear.bias is None for linear in linears}) > 1:
        return torch.cat([module(x) for module in modules], -1)
    adapters = [pair[1] for pair in found if pair is not None]
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    if torch.is_grad_enabled():
        scales = [None if adapter is None else adapter.scale for adapter in adapters]
        tensors = [tensor for adapter in adapters if adapter is not None for tensor in (adapter.a, adapter.b)]
        out: Tensor = _JointLinear.apply(x, scales, *weights, *biases, *tensors)
        return out
    bias = None if biases[0] is None else packed(biases)
    fp8 = _fp8_weights(linears)
    out = fp8_linear(x, joined(fp8), bias) if fp8 else linear(x, packed(weights), bias)
    _add_adapters(out.view(-1, out.shape[-1]), _rows(x), adapters, [len(w) for w in weights])
    return out


class _JointLinear(torch.autograd.Function):
    """scales: of each layer's adapter, None for a layer without. parameters: weights, biases, then (a, b) of each adapter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float | None], *parameters: Tensor) -> Tensor:
        number = len(scales)
        weights, biases, tensors = parameters[:number], parameters[number : 2 * number], parameters[2 * number :]
        ctx.sizes = [len(weight) for weight in weights]
        ctx.scales = scales
        ctx.dtype = _gradient_dtype(next((w for w in weights if w.requires_grad), weights[0]))
        ctx.adapter_dtype = _gradient_dtype(tensors[0]) if tensors else None
        out = linear(x, packed(weights), None if biases[0] is None else packed(biases))
        adapters = _adapters_of(scales, tensors)
        hidden = _add_adapters(out.view(-1, out.shape[-1]), _rows(x), adapters, ctx.sizes)
        ctx.save_for_backward(x, hidden, *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, *parameters = ctx.saved_tensors
        number = len(ctx.sizes)
        wants_x, _, *wants = ctx.needs_input_grad
        grad = grad.flatten(0, -2)
        rows = _rows(x)
        grad_x = grad @ packed(parameters[:number]) if wants_x else None
        grads: list[Tensor | None] = [None] * (2 * number)
        if any(wants[:number]):
            grads[:number] = _weight_gradient(grad, rows, ctx.dtype).split(ctx.sizes)
        if any(wants[number : 2 * number]):
            grads[number:] = grad.sum(0, dtype=ctx.dtype).split(ctx.sizes)
        if hidden is not None:
            adapters = _adapters_of(ctx.scales, parameters[2 * number :])
            grads += _adapter_gradients(grad, rows, hidden, adapters, ctx.sizes, ctx.adapter_dtype, grad_x)
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return grad_x, None, *(part if want else None for part, want in zip(grads, wants))


def add_linear(stream: Tensor, x: Tensor, module: nn.Module) -> Tensor:
    """stream (..., E) + module(x); on CUDA in place, without rounding the product first."""
    found = linear_and_adapter(module)
    if on_gpu(stream) and found is not None and _fp8_weights([found[0]]):
        return stream.add_(joint_linear(x, [module]))
    if on_gpu(stream) and found is not None and found[0].bias is None:
        linear_module, adapter = found
        out: Tensor = _AddLinear.apply(stream, x, linear_module.weight, *(adapter or (None, None, None)))
        return out
    return stream + joint_linear(x, [module])


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float | None
    ) -> Tensor:
        ctx.dtype = _gradient_dtype(weight)
        ctx.mark_dirty(stream)
        _add_product(stream, x, weight)
        hidden = None
        if a is not None and b is not None:
            ctx.adapter_dtype = _gradient_dtype(a)
            ctx.scale = scale
            hidden = _add_adapters(_rows(stream), _rows(x), [Adapter(a, b, scale or 0.0)], [len(weight)])
        ctx.save_for_backward(x, weight, hidden, a, b)
        return stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, hidden, a, b = ctx.saved_tensors
        wants_stream, wants_x, wants_weight, *_ = ctx.needs_input_grad
        half = grad.to(x.dtype).flatten(0, -2)
        rows = _rows(x)
        grad_x = half @ weight if wants_x else None
        grads: list[Tensor | None] = [None, None]
        if hidden is not None:
            adapters = [Adapter(a, b, ctx.scale)]
            grads = _adapter_gradients(half, rows, hidden, adapters, [len(weight)], ctx.adapter_dtype, grad_x)
        return (
            grad if wants_stream else None,
            None if grad_x is None else grad_x.view(x.shape),
            _weight_gradient(half, rows, ctx.dtype) if wants_weight else None,
            *grads,
            None,
        )


def gated_linear(gate_up: Tensor, down: nn.Module, activation: Activation, stream: Tensor | None = None) -> Tensor:
    """down(activation(gate) * up) of gate_up (..., 2 I), gate first; added to `stream` if given.

    On CUDA the backward computes the gated product again instead of keeping it.
    """
    found = linear_and_adapter(down)
    if on_gpu(gate_up) and found is not None and _fp8_weights([found[0]]):
        from lockstep.kernels.gated import gated_product

        product = gated_product(gate_up.flatten(0, -2), activation).view(*gate_up.shape[:-1], -1)
        return joint_linear(product, [down]) if stream is None else add_linear(stream, product, down)
    if on_gpu(gate_up) and found is not None and found[0].bias is None:
        linear_module, adapter = found
        arguments = (linear_module.weight, stream, activation, *(adapter or (None, None, None)))
        out: Tensor = _GatedLinear.apply(gate_up, *arguments)
        return out
    gate, up = gate_up.chunk(2, -1)
    if is_exact() and not on_gpu(gate):
        gate = exact_activation(gate, activation)
    else:
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    if stream is not None:
        return add_linear(stream, gate * up, down)
    return joint_linear(gate * up, [down])


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor,
        stream: Tensor | None,
        activation: Activation,
        a: Tensor | None,
        b: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        from lockstep.kernels.gated import gated_product

        ctx.activation = activation
        ctx.dtype = _gradient_dtype(weight)
        product = gated_product(gate_up.flatten(0, -2), activation).view(*gate_up.shape[:-1], -1)
        if stream is None:
            out = linear(product, weight)
        else:
            ctx.mark_dirty(stream)
            out = _add_product(stream, product, weight)
        hidden = None
        if a is not None and b is not None:
            ctx.adapter_dtype = _gradient_dtype(a)
            ctx.scale = scale
            hidden = _add_adapters(_rows(out), _rows(product), [Adapter(a, b, scale or 0.0)], [len(weight)])
        ctx.save_for_backward(gate_up, weight, hidden, a, b)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.gated import gated_product_gradient

        gate_up, weight, hidden, a, b = ctx.saved_tensors
        half = grad.to(gate_up.dtype).flatten(0, -2)
        product = grad_product = half @ weight  # the kernel overwrites the gradient with the product
        if hidden is not None:
            grad_hidden = (half @ b).mul_(ctx.scale)
            grad_product.addmm_(grad_hidden, a)
        grads = gated_product_gradient(gate_up.flatten(0, -2), grad_product, ctx.activation, product)
        of_adapter: list[Tensor | None] = [None, None]
        if hidden is not None:
            of_adapter = [
                _weight_gradient(grad_hidden, product, ctx.adapter_dtype),
                _weight_gradient(half, hidden, ctx.adapter_dtype).mul_(ctx.scale),
            ]
        return (
            grads.view(gate_up.shape),
            _weight_gradient(half, product, ctx.dtype) if ctx.needs_input_grad[1] else None,
            grad if ctx.needs_input_grad[2] else None,
            None,
            *of_adapter,
            None,
        )


# Products with one weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x (..., I) @ weight (O, I).T + bias. dtype: of the result in exact mode, if not of x."""
    if not is_exact():
        return F.linear(x, weight, bias)
    out: Tensor = _ExactLinear.apply(_rows(x), weight, bias, dtype)
    return out.view(*x.shape[:-1], len(weight))


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = _gradient_dtype(weight)
        ctx.bias_dtype = None if bias is None else _gradient_dtype(bias)
        return exact_product(x, weight, dtype, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad = grad.to(x.dtype)
        return (
            grad @ weight if wants_x else None,
            _weight_gradient(grad, x, ctx.dtype) if wants_weight else None,
            grad.sum(0, dtype=ctx.bias_dtype) if wants_bias else None,
            None,
        )


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., E) @ weight (V, E).T in float32.

    A logit near 16 is quantised to 1/8 in bf16: log-probs of the same token under the same weights would differ by percents
    between two computations that differ in their last bit.
    """
    if is_exact():
        return linear(x, weight, dtype=torch.float32)
    if not (x.is_cuda and x.dtype == weight.dtype and x.dtype in HALF):
        return F.linear(x, weight).float()
    if torch.is_grad_enabled():  # training uses kernels/linear_log_prob.py
        return F.linear(x.float(), weight.float())
    return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))


def _add_product(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """total (..., E) += x (..., I) @ weight (E, I).T on CUDA, accumulated in the dtype of `total`."""
    _add_rows(total.view(-1, total.shape[-1]), _rows(x), weight)
    return total


def _add_rows(total: Tensor, x: Tensor, weight: Tensor, scale: float = 1.0) -> None:
    """total (T, E) += scale * x (T, I) @ weight (E, I).T."""
    if is_exact():
        exact_product(x, weight, total.dtype, add_to=total, scale=scale)
    elif total.dtype == x.dtype:
        total.addmm_(x, weight.t(), alpha=scale)
    else:
        torch.addmm(total, x, weight.t(), alpha=scale, out_dtype=total.dtype, out=total)


def _rows(x: Tensor) -> Tensor:
    """(..., E) -> (T, E); of a tensor that is contiguous a view, which can be added to."""
    return x.reshape(-1, x.shape[-1])


# LoRA adapters


def _adapters_of(scales: Sequence[float | None], tensors: Sequence[Tensor]) -> list[Adapter | None]:
    pairs = iter(zip(tensors[::2], tensors[1::2]))
    return [None if scale is None else Adapter(*next(pairs), scale) for scale in scales]


def _add_adapters(out: Tensor, x: Tensor, adapters: Sequence[Adapter | None], sizes: Sequence[int]) -> Tensor | None:
    """Add each adapter's output to its columns of out (T, sum of sizes); returns x A^T (T, sum of ranks), None without adapters."""
    own = [adapter for adapter in adapters if adapter is not None]
    if not own:
        return None
    hidden = linear(x, packed([adapter.a for adapter in own]))
    parts = iter(hidden.split([len(adapter.a) for adapter in own], -1))
    for columns, adapter in zip(out.split(sizes, -1), adapters):
        if adapter is not None:
            _add_rows(columns, next(parts), adapter.b, adapter.scale)
    return hidden


def _adapter_gradients(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    adapters: Sequence[Adapter | None],
    sizes: Sequence[int],
    dtype: torch.dtype,
    grad_x: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of a and b of each adapter in turn, from grad (T, sum of sizes); adds theirs to grad_x (T, I)."""
    own = [(columns, adapter) for columns, adapter in zip(grad.split(sizes, -1), adapters) if adapter is not None]
    ranks = [len(adapter.a) for _, adapter in own]
    grad_hidden = torch.cat([(columns @ adapter.b).mul_(adapter.scale) for columns, adapter in own], -1)
    if grad_x is not None:
        grad_x.addmm_(grad_hidden, packed([adapter.a for _, adapter in own]))
    grads_a = _weight_gradient(grad_hidden, x, dtype).split(ranks)
    grads: list[Tensor | None] = []
    for grad_a, part, (columns, adapter) in zip(grads_a, hidden.split(ranks, -1), own):
        grads += [grad_a, _weight_gradient(columns, part, dtype).mul_(adapter.scale)]
    return grads


# Gradients of weights


def _gradient_dtype(parameter: Tensor | None) -> torch.dtype:
    """In which the parameter's gradient is accumulated. Asked in the forward: checkpointing returns copies later."""
    assert parameter is not None
    wide = parameter.is_leaf and getattr(parameter, "grad_dtype", None) == torch.float32
    return torch.float32 if wide else parameter.dtype


def _weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad (T, O).T @ x (T, I) in the given dtype."""
    if x.is_cuda and x.dtype != dtype:
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return grad.t() @ x
