"""A decoder's forward on the CPU without its modules: at small sizes they take longer than what they compute.

    embedding ─► [ norm ─► q, k, v ─► rotary ─► attention ─► += output ─► norm ─► gate, up ─► += down ]* ─► norm

A token is a column in all tensors: the products then have the weights on the left, which the matrix library does faster for few
tokens, and add to the stream in place.

For decoders of this form only: `flat_form` looks at the parts, and compares the result, and what every layer attends with, with
those of the model's own forward. The weights are looked up when serving begins, and let go when it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.models.attention import AttentionContext, LayerOptions, PackedAttention
from lockstep.models.fused_layers import agree

Forward = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""(1, T) tokens and positions, attention context -> (T, E) hidden states."""

LARGEST_COPY = 1 << 18
"""Weights of so many elements are copied to have them in one: one product of them is faster than two."""


class Product:
    """Linear layers of one input."""

    def __init__(self, *linears: nn.Linear) -> None:
        weights = [m.weight.detach() for m in linears]
        biases = [None if m.bias is None else m.bias.detach()[:, None] for m in linears]
        if sum(weight.numel() for weight in weights) <= LARGEST_COPY and len({bias is None for bias in biases}) == 1:
            weights = [torch.cat(weights)]
            biases = [None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])]
        self._parts = list(zip(weights, biases))
        self._sizes = [len(weight) for weight in weights]

    def __call__(self, x: Tensor) -> Tensor:
        """(I, T) -> (O, T), the layers' outputs below each other"""
        if len(self._parts) == 1:
            return _product(*self._parts[0], x)
        outputs = x.new_empty(sum(self._sizes), x.shape[1])
        for part, out in zip(self._parts, outputs.split(self._sizes)):
            _product(*part, x, out)
        return outputs


def _product(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mm(weight, x, out=out) if bias is None else torch.addmm(bias, weight, x, out=out)


@dataclass(frozen=True)
class FlatForm:
    """What the parts do not tell. offset: whether a norm's factor is 1 + weight; hows: how each layer attends."""

    offset: bool
    hows: list[LayerOptions]


class Norm:
    def __init__(self, module: Any, offset: bool) -> None:
        weight = module.weight.detach()[:, None]
        self._factor = 1 + weight if offset else weight
        self._eps = torch.tensor(getattr(module, "variance_epsilon", None) or module.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension but one."""
        wide = x.float()
        squares = (wide * wide).sum(-2, keepdim=True)
        scale = torch.add(self._eps, squares, alpha=1 / x.shape[-2]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self._factor)


class Layer(NamedTuple):
    attention: Any
    how: LayerOptions
    input_norm: Norm
    qkv: Product
    q_norm: Norm | None
    k_norm: Norm | None
    num_heads: int
    num_key_heads: int
    head_dim: int
    swapped: Tensor
    output: Tensor
    mlp_norm: Norm
    gate_up: Product
    act: Callable[[Tensor], Tensor]
    down: Tensor

    @classmethod
    def of(cls, layer: Any, how: LayerOptions, offset: bool) -> "Layer":
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            attention=attention,
            how=how,
            input_norm=Norm(layer.input_layernorm, offset),
            qkv=Product(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=Norm(attention.q_norm, offset) if hasattr(attention, "q_norm") else None,
            k_norm=Norm(attention.k_norm, offset) if hasattr(attention, "k_norm") else None,
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_key_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            swapped=torch.arange(attention.head_dim).roll(attention.head_dim // 2),
            output=attention.o_proj.weight.detach(),
            mlp_norm=Norm(layer.post_attention_layernorm, offset),
            gate_up=Product(mlp.gate_proj, mlp.up_proj),
            act=mlp.act_fn.forward,
            down=mlp.down_proj.weight.detach(),
        )

    def add_to(
        self, stream: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, wanted: Tensor | None = None
    ) -> Tensor:
        """stream (E, T), cos and sin (D, T), the first half of sin negated -> the stream, of the tokens that are `wanted`."""
        qkv = self.qkv(self.input_norm(stream)).view(-1, self.head_dim, stream.shape[1])
        num_turned = self.num_heads + self.num_key_heads
        heads, v = qkv[:num_turned], qkv[num_turned:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = heads[: self.num_heads], heads[self.num_heads :]
            heads = torch.cat((self.q_norm(q), self.k_norm(k)))
        turned = _by_token(torch.addcmul(heads * cos, heads.index_select(1, self.swapped), sin))
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        out = context.attend(self.attention, q, k, _by_token(v), self.how).reshape(stream.shape[1], -1).t()
        if wanted is not None:
            stream, out = stream.index_select(1, wanted), out.index_select(1, wanted)
        stream.addmm_(self.output, out)
        gate_up, inner = self.gate_up(self.mlp_norm(stream)), self.down.shape[1]
        gate, up = gate_up[:inner], gate_up[inner:]
        return stream.addmm_(self.down, self.act(gate).mul_(up))


def _by_token(heads: Tensor) -> Tensor:
    """(H, D, T) -> (1, H, T, D)"""
    return heads.transpose(1, 2)[None]


MOVING_ROPES = ("dynamic", "longrope")
"""Their frequencies change with the longest position of a call, also for the rows beside it."""

LARGEST_TABLE = 1 << 16
"""Positions beyond are computed when they come."""


class Rotary:
    """cos and sin of positions, the first half of sin negated, which depend on the position alone; computed once."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._table = torch.empty(0, 0)

    def __call__(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """(1, T) positions -> (D, T) each, of the type of `like`."""
        longest = int(position_ids.max())
        if longest >= LARGEST_TABLE:
            return self._computed(like, position_ids).chunk(2)
        if longest >= self._table.shape[1]:
            self._table = self._computed(like, torch.arange(2 * longest + 2)[None])
        return self._table.index_select(1, position_ids[0]).chunk(2)

    def _computed(self, like: Tensor, position_ids: Tensor) -> Tensor:
        cos, sin = (t[0].t() for t in self._module(like, position_ids))
        first, second = sin.chunk(2)
        return torch.cat((cos, -first, second))


class FlatDecoder:
    """decoder: its weights must stay where they are while this one is used."""

    def __init__(self, decoder: Any, form: FlatForm) -> None:
        self._embed, self._rotary = decoder.embed_tokens.forward, Rotary(decoder.rotary_emb)
        self._layers = [Layer.of(layer, how, form.offset) for layer, how in zip(decoder.layers, form.hows)]
        self._norm = Norm(decoder.norm, form.offset)

    def __call__(
        self, token_ids: Tensor, position_ids: Tensor, context: AttentionContext, wanted: Tensor | None = None
    ) -> Tensor:
        """(1, T) -> (T, E), or of the tokens `wanted`, which the last layer alone computes to its end."""
        embedded = self._embed(token_ids)
        cos, sin = self._rotary(embedded, position_ids)
        stream = embedded[0].t().contiguous()
        for layer in self._layers[:-1]:
            layer.add_to(stream, cos, sin, context)
        stream = self._layers[-1].add_to(stream, cos, sin, context, wanted)
        return self._norm(stream).t().contiguous()


@torch.no_grad()
def flat_form(decoder: Any, own: Forward) -> FlatForm | None:
    """The form in which a flat forward computes what the decoder's own does; None where there is none."""
    names = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if set(dict(decoder.named_children())) != names or not all(_is_usual(layer) for layer in decoder.layers):
        return None
    if getattr(decoder.rotary_emb, "rope_type", None) in MOVING_ROPES:
        return None
    ids, last = torch.arange(5)[None], decoder.config.max_position_embeddings - 1
    positions = torch.tensor([[0, 1, 2, last // 2, last]])  # some layers do otherwise from a far position on
    expected = _Witness(5)
    hidden = own(ids, positions, expected)
    for offset in (False, True):
        form, got = FlatForm(offset, expected.hows), _Witness(5)
        try:
            same = agree(FlatDecoder(decoder, form)(ids, positions, got), hidden, 2.0)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None  # parts of the same names that want other arguments
        if same and all(agree(*pair, 2.0) for pair in zip(got.seen, expected.seen)):
            return form
    return None


def _is_usual(layer: Any) -> bool:
    parts = {name: set(dict(part.named_children())) for name, part in layer.named_children()}
    if set(parts) != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not linears <= parts["self_attn"] <= linears | {"q_norm", "k_norm"}:
        return False
    if parts["mlp"] != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    plain = [*(getattr(attention, n) for n in linears), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(linear) is nn.Linear for linear in plain)
        and attention.o_proj.bias is None
        and mlp.down_proj.bias is None
        and hasattr(attention, "head_dim")
    )


class _Witness:
    """An attention context that keeps what the layers attend with."""

    def __init__(self, length: int) -> None:
        self._context = PackedAttention([length], torch.device("cpu"))
        self.hows: list[LayerOptions] = []
        self.seen: list[Tensor] = []

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        self.hows.append(how)
        self.seen += [query, key, value]
        return self._context.attend(layer, query, key, value, how)
