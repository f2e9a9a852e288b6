"""Layers of a small decoder that trains on the CPU, each one step of autograd.

    norm ─► q, k, v ─► rotary ─► short attention ─► += output ─► norm ─► += mlp      and the same backwards

For a small model, modules and autograd take as long as what they compute. The parts are the functions of `models/host_layers.py`
and `models/short_attention.py`, called one after another. A layer has this form for calls in float32 over short rows; for any other
it is called as it was. Which layers have it is told by their parts, and by comparing what they give.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.models.attention import LayerOptions, PackedAttention, Witness
from lockstep.models.fused_layers import agree, gate_activation, is_plain_mlp, is_usual_layer, norm_eps, norm_offset
from lockstep.models.host_layers import ACTIVATIONS, GatedMlp, RmsNorm, Rotation
from lockstep.models.short_attention import ShortAttention, ShortRows

WIDEST = 512
"""Elements of a token up to which modules and autograd are worth sparing."""

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LayerForm(NamedTuple):
    """What the parameters of a layer do not tell.

    how:        how it attends.
    before:     eps and offset of the norm before the attention; after: of the one after it.
    activation: that of the MLP, and its gradient.
    """

    how: LayerOptions
    head_dim: int
    before: tuple[float, bool]
    after: tuple[float, bool]
    activation: tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]


def flatten_layers(model: nn.Module) -> int:
    """Give the layers of this form a forward of one step; returns how many there are."""
    number = 0
    for decoder in model.modules():
        rotary, layers = (getattr(decoder, name, None) for name in ("rotary_emb", "layers"))
        if rotary is None or not isinstance(layers, nn.ModuleList):
            continue
        for layer in layers:
            form = _form_of(layer, rotary)
            if form is not None:
                layer.__dict__["forward"] = MethodType(_forward_by(form), layer)
                number += 1
    return number


def _forward_by(form: LayerForm) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        context: Any = options.get("lockstep_context")
        if args or "position_embeddings" not in options or not _fits(self, form, hidden_states, context):
            return type(self).forward(self, hidden_states, *args, **options)
        cos, sin = options["position_embeddings"]
        return _compute(self, form, hidden_states, cos, sin, context)

    return forward


def _fits(layer: Any, form: LayerForm, x: Tensor, context: Any) -> bool:
    return (
        isinstance(context, PackedAttention)
        and context.has_short_rows(form.head_dim)
        and x.device.type == "cpu"
        and x.dtype == layer.self_attn.q_proj.weight.dtype == torch.float32
        and _has_plain_parts(layer)  # none was wrapped since
    )


def _has_plain_parts(layer: Any) -> bool:
    return is_plain_mlp(layer.mlp) and all(type(getattr(layer.self_attn, name)) is nn.Linear for name in LINEARS)


def _compute(layer: Any, form: LayerForm, x: Tensor, cos: Tensor, sin: Tensor, context: PackedAttention) -> Tensor:
    """x: (1, T, E), cos and sin (1, T, D)"""
    mlp, linears = layer.mlp, [getattr(layer.self_attn, name) for name in LINEARS]
    num_heads, num_key_heads = (linear.out_features // form.head_dim for linear in linears[:2])
    rows, masks = context.short_plan(context.window_of(form.how), num_key_heads, num_heads)
    biases, weights = [linear.bias for linear in linears[:3]], [linear.weight for linear in linears]
    norms = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    of_mlp = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    out: Tensor = _Layer.apply(x, cos, sin, rows, masks, form, *biases, *weights, *norms, *of_mlp)
    return out


class _Part:
    """Stands in for the ctx of a function that is called within another one."""

    def __init__(self, *needs_input_grad: bool) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _gradients(function: Any, part: _Part, grad: Tensor) -> Any:
    """What the inputs of a part get."""
    return function.backward(part, grad)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: ShortRows,
        masks: list[Tensor],
        form: LayerForm,
        *parameters: Any,
    ) -> Tensor:
        biases, of_heads, (of_output, before, after, *of_mlp) = parameters[:3], parameters[3:6], parameters[6:]
        weight, bias = torch.cat(of_heads), None if biases[0] is None else torch.cat(biases)
        num_key_heads = len(of_heads[1]) // form.head_dim
        norm, rotation, attention, mlp_norm, mlp = parts = [*(_Part() for _ in range(4)), _Part(True, True, True, True)]
        normed = RmsNorm.forward(norm, x, before, *form.before)[0]
        qkv = F.linear(normed, weight, bias).unflatten(1, (-1, form.head_dim))  # (T, H + 2 HK, D)
        heads, values = qkv[:, :-num_key_heads], qkv[:, -num_key_heads:]
        heads = Rotation.forward(rotation, heads, cos[0, :, None], sin[0, :, None])
        queries, keys = heads[:, :-num_key_heads], heads[:, -num_key_heads:]
        attended = ShortAttention.forward(attention, queries, keys, values, rows, masks, form.how.scaling).flatten(1)
        stream = torch.addmm(x[0], attended, of_output.t())[None]
        mlp_input = RmsNorm.forward(mlp_norm, stream, after, *form.after)
        activation, through_activation = form.activation
        gate, up, down = of_mlp
        out = GatedMlp.forward(mlp, mlp_input, gate, up, down, activation, through_activation).add_(stream)
        ctx.parts, ctx.sizes = parts, [len(w) for w in of_heads]
        ctx.counts = [len(part.saved_tensors) for part in parts]
        ctx.save_for_backward(normed, weight, attended, of_output, *(t for part in parts for t in part.saved_tensors))
        for part in parts:
            part.saved_tensors = ()  # autograd alone holds them
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, weight, attended, of_output, *saved = ctx.saved_tensors
        for part, count in zip(ctx.parts, ctx.counts):
            part.saved_tensors, saved = tuple(saved[:count]), saved[count:]
        norm, rotation, attention, mlp_norm, mlp = ctx.parts
        for_mlp_input, *for_mlp = _gradients(GatedMlp, mlp, grad)[:4]
        for_stream, for_after = _gradients(RmsNorm, mlp_norm, for_mlp_input)[:2]
        for_stream += grad
        rows = for_stream[0]
        head_dim = attention.saved_tensors[1].shape[1]
        for_attended = (rows @ of_output).unflatten(1, (-1, head_dim))
        for_queries, for_keys, for_values = _gradients(ShortAttention, attention, for_attended)[:3]
        for_heads = _gradients(Rotation, rotation, torch.cat((for_queries, for_keys), 1))[0]
        for_qkv = torch.cat((for_heads, for_values), 1).flatten(1)
        for_x, for_before = _gradients(RmsNorm, norm, (for_qkv @ weight)[None])[:2]
        for_x += for_stream
        for_biases = for_qkv.sum(0).split(ctx.sizes)
        for_weights = (for_qkv.t() @ normed).split(ctx.sizes)
        for_output = rows.t() @ attended
        found = (for_x, *[None] * 5, *for_biases, *for_weights, for_output, for_before, for_after, *for_mlp)
        return tuple(gradient if wanted else None for gradient, wanted in zip(found, ctx.needs_input_grad))


@torch.no_grad()
def _form_of(layer: Any, rotary: Any) -> LayerForm | None:
    if not is_usual_layer(layer) or set(dict(layer.self_attn.named_children())) != set(LINEARS):
        return None
    attention, activation = layer.self_attn, gate_activation(layer.mlp)
    weight, head_dim = attention.q_proj.weight, getattr(attention, "head_dim", None)
    one_kind = len({getattr(attention, name).bias is None for name in LINEARS[:3]}) == 1
    if activation is None or not _has_plain_parts(layer) or not one_kind or head_dim is None:
        return None
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.shape[1] > WIDEST:
        return None
    norms = [
        (norm_eps(norm), bool(norm_offset(norm))) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    context = PackedAttention([4, 3], weight.device)
    witness = Witness(context)
    x = torch.randn(1, 7, weight.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        cos, sin = rotary(x, torch.tensor([[0, 1, 2, 3, 0, 1, 2]]))
        expected = type(layer).forward(layer, x, position_embeddings=(cos, sin), lockstep_context=witness)
        if len(witness.hows) != 1:
            return None
        form = LayerForm(witness.hows[0], head_dim, norms[0], norms[1], ACTIVATIONS[activation])
        same = agree(_compute(layer, form, x, cos, sin, context), expected, 2.0)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # parts of the same names that want other arguments
    return form if same else None
