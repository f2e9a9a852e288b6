"""Layers of a small decoder that trains on the CPU, each one step of autograd.

    norm ─► q, k, v ─► rotary ─► short attention ─► += output ─► norm ─► += mlp      and the same backwards

For a small model, modules and autograd take as long as what they compute, and every pass over the tokens counts. So a norm's factor
is multiplied into the weights that come after it, and the rows of the weights of queries and keys are taken in an order in which
the rotary embedding is one product of complex numbers; both cost little, as such weights are smaller than the tokens of a batch.

A layer has this form for calls in float32 over short rows; for any other it is called as it was. Which layers have it is told by
their parts, and by comparing what they give.
"""

import logging
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.models.attention import LayerOptions, PackedAttention, Witness
from lockstep.models.fused_layers import agree, gate_activation, is_plain_mlp, is_usual_layer, norm_eps, norm_offset
from lockstep.models.host_layers import ACTIVATIONS, GatedMlp
from lockstep.models.rotary_table import RotaryTable, as_numbers, pair_order, stands_still
from lockstep.models.short_attention import ShortRows, attend, attend_backward

logger = logging.getLogger(__name__)

WIDEST = 512
"""Elements of a token up to which modules and autograd are worth sparing."""

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


class RowRotation:
    """What a rotary module gives for a row of tokens: the pair of cos and sin, computed where a layer asks for it, or numbers.

    like:   has the type of what is given.
    tables: those of `numbers`, which outlast a row.
    """

    def __init__(self, rotary: Any, like: Tensor, position_ids: Tensor, tables: dict[int, RotaryTable]) -> None:
        self._rotary, self._tables = rotary, tables
        self._like, self._position_ids = like.new_empty(0), position_ids
        self._numbers: dict[int, Tensor] = {}
        self._inverse: dict[int, Tensor] = {}

    @cached_property
    def pair(self) -> tuple[Tensor, Tensor]:
        cos, sin = type(self._rotary).forward(self._rotary, self._like, self._position_ids)
        return cos, sin

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.pair)

    def __getitem__(self, which: int) -> Tensor:
        return self.pair[which]

    def __len__(self) -> int:
        return 2

    def numbers(self, times: int) -> Tensor:
        """(T, 1, times * D / 2) complex: a head times these is turned, where a number holds one element of each half of it."""
        if times not in self._numbers:
            if times not in self._tables:
                self._tables[times] = RotaryTable(partial(as_numbers, times=times), dim=0)
            found = self._tables[times](self._rotary, self._like, self._position_ids)
            self._numbers[times] = torch.view_as_complex(found.view(len(found), 1, -1, 2))
        return self._numbers[times]

    def inverse(self, times: int) -> Tensor:
        """Those that turn a gradient back."""
        if times not in self._inverse:
            self._inverse[times] = self.numbers(times).conj_physical()
        return self._inverse[times]


class LayerForm(NamedTuple):
    """What the parameters of a layer do not tell.

    Of each key head the G queries, the key and the value lie side by side; in queries and keys, the elements that the rotary
    embedding turns together do.

    how:        how it attends.
    order:      rows of the weights of queries, keys and values, one below the other, as they are wanted; back: the reverse.
    sizes:      rows of each of the three.
    width:      (G + 2) * D.
    eps:        of the norm before the attention and of the one after it; offset: whether their factor is 1 + weight.
    activation: that of the MLP, and its gradient.
    """

    how: LayerOptions
    head_dim: int
    num_key_heads: int
    width: int
    order: Tensor
    back: Tensor
    sizes: list[int]
    eps: list[Tensor]
    offset: bool
    activation: tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]

    @property
    def num_turned(self) -> int:
        """Heads of a key head that are turned: its queries and the key."""
        return self.width // self.head_dim - 1

    def turned(self, qkv: Tensor) -> Tensor:
        """(T * HK, (G + 2) * D) -> the part that is turned, (T, HK, (G + 1) * D / 2) complex"""
        pairs = torch.view_as_complex(qkv.view(-1, self.num_key_heads, self.width // 2, 2))
        return pairs[..., : self.num_turned * self.head_dim // 2]


def _row_order(num_heads: int, num_key_heads: int, head_dim: int) -> Tensor:
    """`LayerForm.order`"""
    by_head = torch.arange((num_heads + 2 * num_key_heads) * head_dim).view(-1, head_dim)
    queries, keys, values = by_head.split((num_heads, num_key_heads, num_key_heads))
    turned = torch.cat((queries.view(num_key_heads, -1, head_dim), keys[:, None]), 1)
    return torch.cat((turned[..., pair_order(head_dim)], values[:, None]), 1).flatten()


def flatten_layers(model: nn.Module) -> int:
    """Give the layers of this form a forward of one step; returns how many there are."""
    number = 0
    for decoder in model.modules():
        rotary, layers = (getattr(decoder, name, None) for name in ("rotary_emb", "layers"))
        if not isinstance(rotary, nn.Module) or not isinstance(layers, nn.ModuleList):
            continue
        if not stands_still(rotary, torch.zeros(0)):
            continue
        forms = [_form_of(layer, rotary) for layer in layers]
        for layer, form in zip(layers, forms):
            if form is not None:
                layer.__dict__["forward"] = MethodType(_forward_by(form), layer)
                number += 1
        if any(forms):
            rotary.__dict__["forward"] = MethodType(_rotation_forward, rotary)
    return number


def _rotation_forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
    if args or options or x.device.type != "cpu" or x.dtype != torch.float32 or len(position_ids) != 1:
        return type(self).forward(self, x, position_ids, *args, **options)
    return RowRotation(self, x, position_ids, self.__dict__.setdefault("lockstep_tables", {}))


def _forward_by(form: LayerForm) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        context, rotation = (options.get(name) for name in ("lockstep_context", "position_embeddings"))
        if args or not isinstance(rotation, RowRotation) or not _fits(self, form, hidden_states, context):
            return type(self).forward(self, hidden_states, *args, **options)
        return _compute(self, form, hidden_states, rotation, cast(PackedAttention, context))

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


def _compute(layer: Any, form: LayerForm, x: Tensor, rotation: RowRotation, context: PackedAttention) -> Tensor:
    """x: (1, T, E)"""
    mlp, linears = layer.mlp, [getattr(layer.self_attn, name) for name in LINEARS]
    num_heads = (form.num_turned - 1) * form.num_key_heads
    rows, masks = context.short_plan(context.window_of(form.how), form.num_key_heads, num_heads)
    biases, weights = [linear.bias for linear in linears[:3]], [linear.weight for linear in linears]
    norms = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    of_mlp = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    out: Tensor = _Layer.apply(x, rotation, rows, masks, form, *biases, *weights, *norms, *of_mlp)
    return out


class _Part:
    """Stands in for the ctx of a function that is called within another one."""

    def __init__(self, *needs_input_grad: bool) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rotation: RowRotation,
        rows: ShortRows,
        masks: list[Tensor],
        form: LayerForm,
        *parameters: Any,
    ) -> Tensor:
        biases, of_heads, (of_output, *norms, of_gate, of_up, of_down) = parameters[:3], parameters[3:6], parameters[6:]
        before, after = (1 + norm if form.offset else norm for norm in norms)
        of_qkv = torch.cat(of_heads).index_select(0, form.order)
        weight, bias = of_qkv * before, None if biases[0] is None else torch.cat(biases).index_select(0, form.order)
        normed, scale = _normed(x[0], form.eps[0])
        qkv = F.linear(normed, weight, bias).view(-1, form.width)  # (T * HK, (G + 2) * D)
        form.turned(qkv).mul_(rotation.numbers(form.num_turned))
        of_query, of_key_and_value = qkv.split((form.width - 2 * form.head_dim, 2 * form.head_dim), 1)
        q, kv = of_query.index_select(0, rows.queries), of_key_and_value.index_select(0, rows.keys)
        k, v = kv.chunk(2, 1)
        attended, probs = attend(q, k, v, rows, masks, form.how.scaling)
        attended = attended.view(len(normed), -1)
        stream = torch.addmm(x[0], attended, of_output.t())
        mlp_normed, mlp_scale = _normed(stream, form.eps[1])
        mlp = _Part(True, True, True, True)
        added = GatedMlp.forward(mlp, mlp_normed, of_gate * after, of_up * after, of_down, *form.activation)
        saved = (normed, scale, mlp_scale, weight, of_qkv, before, after, of_output, of_gate, of_up, attended, q, kv)
        ctx.save_for_backward(*saved, *mlp.saved_tensors, *probs)
        mlp.saved_tensors = ()  # autograd alone holds them
        ctx.mlp, ctx.rotation, ctx.rows, ctx.form = mlp, rotation, rows, form
        return torch.add(stream[None], added[None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, mlp_scale, weight, of_qkv, before, after, of_output, of_gate, of_up, *saved = ctx.saved_tensors
        (attended, q, kv), of_mlp, probs = saved[:3], saved[3:11], saved[11:]
        mlp, rows, form = ctx.mlp, ctx.rows, ctx.form
        mlp.saved_tensors = of_mlp
        for_mlp_normed, for_gate, for_up, for_down = cast(list[Tensor], GatedMlp.backward(mlp, grad[0])[:4])
        for_after = torch.mul(for_gate, of_gate).addcmul_(for_up, of_up).sum(0)
        for_stream = _through_norm(for_mlp_normed, of_mlp[0], mlp_scale, grad[0])

        for_attended = (for_stream @ of_output).view(-1, q.shape[1])
        for_qkv = torch.empty(len(for_attended), form.width)
        parts = for_qkv.split((form.width - 2 * form.head_dim, form.head_dim, form.head_dim), 1)
        k, v = kv.chunk(2, 1)
        attend_backward(for_attended, q, k, v, probs, rows, form.how.scaling, parts)
        form.turned(for_qkv).mul_(ctx.rotation.inverse(form.num_turned))
        for_qkv = for_qkv.view(len(normed), -1)
        for_weight = (normed.t() @ for_qkv).t()
        for_before = torch.mul(for_weight, of_qkv).sum(0)
        for_x = _through_norm(for_qkv @ weight, normed, scale, for_stream)

        for_biases = for_qkv.sum(0).index_select(0, form.back).split(form.sizes)
        for_heads = torch.mul(for_weight, before).index_select(0, form.back).split(form.sizes)
        of_weights = (for_stream.t() @ attended, for_before, for_after, for_gate * after, for_up * after, for_down)
        found = (for_x[None], *[None] * 4, *for_biases, *for_heads, *of_weights)
        return tuple(gradient if wanted else None for gradient, wanted in zip(found, ctx.needs_input_grad))


def _normed(x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """x: (T, E) -> x over the root of its mean square, and one over that root (T, 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return x * scale, scale


def _through_norm(grad: Tensor, normed: Tensor, scale: Tensor, added: Tensor) -> Tensor:
    """The gradient of what was normed, given that of the normed; plus `added`.

    With n = x * s: s * (g - n * mean(g * n)), as s falls with the length of x.
    """
    share = torch.linalg.vecdot(grad, normed)[:, None].mul_(scale)
    return torch.addcmul(added, grad, scale).addcmul_(normed, share, value=-1 / normed.shape[-1])


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
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    offsets = {norm_offset(norm) for norm in norms}
    if len(offsets) != 1:
        return None
    context = PackedAttention([4, 3], weight.device)
    witness = Witness(context)
    x = torch.randn(1, 7, weight.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        rotation = RowRotation(rotary, x, torch.tensor([[0, 1, 2, 3, 0, 1, 2]]), {})
        expected = type(layer).forward(layer, x, position_embeddings=rotation.pair, lockstep_context=witness)
        if len(witness.hows) != 1:
            return None
        sizes = [len(getattr(attention, name).weight) for name in LINEARS[:3]]
        num_heads, num_key_heads = sizes[0] // head_dim, sizes[1] // head_dim
        order = _row_order(num_heads, num_key_heads, head_dim)
        form = LayerForm(
            how=witness.hows[0],
            head_dim=head_dim,
            num_key_heads=num_key_heads,
            width=sum(sizes) // num_key_heads,
            order=order,
            back=order.argsort(),
            sizes=sizes,
            eps=[torch.tensor(norm_eps(norm)) for norm in norms],
            offset=bool(offsets.pop()),
            activation=ACTIVATIONS[activation],
        )
        same = agree(_compute(layer, form, x, rotation, context), expected, 2.0)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        logger.debug("%s is called as it is", type(layer).__name__, exc_info=True)
        return None  # parts of the same names that want other arguments
    return form if same else None
