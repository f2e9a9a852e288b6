"""A decoder's forward on the CPU without its modules: at small sizes they take longer than what they compute.

    embedding ─► [ norm ─► q, k, v ─► rotary ─► attention ─► += output ─► norm ─► gate, up ─► += down ]* ─► norm

A token is a column in all tensors: the products then have the weights on the left, which the matrix library does faster for few
tokens, and add to the stream in place. What is computed on the way goes to rooms, tensors that are kept with their views from one
call to the next of as many tokens: to make them each time would take as long as to fill them.

For decoders of this form only: `flat_form` looks at the parts, and compares the result, and what every layer attends with, with
those of the model's own forward. The weights are looked up, small ones copied, when serving begins, and let go when it ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.models.attention import AttentionContext, LayerOptions, PackedAttention, Witness
from lockstep.models.fused_layers import agree
from lockstep.models.log_probs import VocabularyHead
from lockstep.models.paged_attention import WindowAttention
from lockstep.models.rotary_table import MOVING_ROPES, RotaryTable

Forward = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""(1, T) tokens and positions, attention context -> (T, E) hidden states."""

LARGEST_COPY = 1 << 18
"""Weights of so many elements are copied where that makes their product faster."""


class NormRoom:
    """Where norms of tensors (…, E, T) of one shape compute."""

    def __init__(self, like: Tensor) -> None:
        *others, _, num_tokens = like.shape
        self.wide, self.scale = torch.empty(like.shape), torch.empty(*others, 1, num_tokens)


class Norm:
    """Over the last dimension but one; what it gives may lie in the room."""

    def __init__(self, module: Any, offset: bool) -> None:
        weight = module.weight.detach()
        self.factor = 1 + weight if offset else weight
        self._column = self.factor[:, None]
        self._share = 1 / len(weight)
        self._eps = torch.tensor((getattr(module, "variance_epsilon", None) or module.eps) * self._share)

    def __call__(self, x: Tensor, room: NormRoom) -> Tensor:
        return self.without_factor(x, room).mul_(self._column)

    def without_factor(self, x: Tensor, room: NormRoom) -> Tensor:
        wide = x if x.dtype == torch.float32 else x.float()
        squares = torch.addcmul(self._eps, wide, wide, value=self._share, out=room.wide)
        torch.sum(squares, -2, keepdim=True, out=room.scale).rsqrt_()
        normed = torch.mul(wide, room.scale, out=room.wide)
        return normed if wide is x else normed.to(x.dtype)


class Product:
    """Linear layers of one input, which a norm gives."""

    def __init__(self, norm: Norm, *linears: nn.Linear) -> None:
        weights = [m.weight.detach() for m in linears]
        biases = [None if m.bias is None else m.bias.detach()[:, None] for m in linears]
        self._normed: Callable[[Tensor, NormRoom], Tensor] = norm
        if sum(weight.numel() for weight in weights) <= LARGEST_COPY and len({bias is None for bias in biases}) == 1:
            weights = [torch.cat(weights)]  # one product is faster than two
            biases = [None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])]
            if weights[0].dtype == torch.float32:  # in half precision a weight times the factor would be rounded
                weights[0] *= norm.factor
                self._normed = norm.without_factor
        self._parts = list(zip(weights, biases))
        self.sizes = [len(weight) for weight in weights]

    def places_in(self, outputs: Tensor) -> Sequence[Tensor]:
        """The parts of `outputs` (O, T) that the products go to, the layers' below each other."""
        return outputs.split(self.sizes)

    def put(self, x: Tensor, room: NormRoom, places: Sequence[Tensor]) -> None:
        """x: (I, T)"""
        normed = self._normed(x, room)
        for (weight, bias), out in zip(self._parts, places):
            if bias is None:
                torch.mm(weight, normed, out=out)
            else:
                torch.addmm(bias, weight, normed, out=out)


class AttentionRoom:
    """Where layers of one kind compute what they attend with: query, key and value are (1, H, T, D)."""

    def __init__(self, layer: "Layer", stream: Tensor, norm: NormRoom) -> None:
        num_heads, num_key_heads = layer.num_heads, layer.num_key_heads
        self.norm = norm
        qkv = stream.new_empty(num_heads + 2 * num_key_heads, layer.head_dim, stream.shape[1])
        self.qkv = layer.qkv.places_in(qkv.flatten(0, 1))
        self.heads, values = qkv.split((num_heads + num_key_heads, num_key_heads))
        self.normed_heads = self.heads.split((num_heads, num_key_heads)) if layer.head_norms else ()
        self.head_norms = [NormRoom(heads) for heads in self.normed_heads]
        self.swapped, self.turned = torch.empty_like(self.heads), torch.empty_like(self.heads)
        self.query, self.key = (_by_token(heads) for heads in self.turned.split((num_heads, num_key_heads)))
        self.value = _by_token(values)
        self._out, self._columns = torch.empty(0), torch.empty(0)

    def columns(self, out: Tensor) -> Tensor:
        """(1, T, H, D) -> (H * D, T); a window gives its results in the same tensor each time."""
        if out is not self._out:
            self._out, self._columns = out, out.flatten(2)[0].t()
        return self._columns


def _by_token(heads: Tensor) -> Tensor:
    """(H, D, T) -> (1, H, T, D)"""
    return heads.transpose(1, 2)[None]


class MlpRoom:
    """Where layers of one kind compute what follows the attention."""

    def __init__(self, layer: "Layer", stream: Tensor, norm: NormRoom) -> None:
        self.norm = norm
        gate_up = stream.new_empty(2 * layer.down.shape[1], stream.shape[1])
        self.gate_up = layer.gate_up.places_in(gate_up)
        self.gate, self.up = gate_up.chunk(2)


class Layer(NamedTuple):
    attention: Any
    how: LayerOptions
    qkv: Product
    head_norms: Sequence[Norm]
    num_heads: int
    num_key_heads: int
    head_dim: int
    swapped: Tensor
    output: Tensor
    gate_up: Product
    act: Callable[[Tensor], Tensor]
    down: Tensor

    @classmethod
    def of(cls, layer: Any, how: LayerOptions, offset: bool) -> "Layer":
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        return cls(
            attention=attention,
            how=how,
            qkv=Product(Norm(layer.input_layernorm, offset), attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms=[Norm(norm, offset) for norm in head_norms],
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_key_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            swapped=torch.arange(attention.head_dim).roll(attention.head_dim // 2),
            output=attention.o_proj.weight.detach(),
            gate_up=Product(Norm(layer.post_attention_layernorm, offset), mlp.gate_proj, mlp.up_proj),
            act=mlp.act_fn.forward,
            down=mlp.down_proj.weight.detach(),
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind fit the same rooms."""
        heads = self.num_heads, self.num_key_heads, self.head_dim, len(self.head_norms)
        return *heads, *self.qkv.sizes, *self.gate_up.sizes

    def attend(
        self, stream: Tensor, room: AttentionRoom, cos: Tensor, sin: Tensor, context: AttentionContext
    ) -> Tensor:
        """stream (E, T), cos and sin (D, T), the first half of sin negated -> (H * D, T)"""
        self.qkv.put(stream, room.norm, room.qkv)
        for norm, heads, norm_room in zip(self.head_norms, room.normed_heads, room.head_norms):
            heads.copy_(norm(heads, norm_room))
        torch.mul(room.heads, cos, out=room.turned)
        torch.index_select(room.heads, 1, self.swapped, out=room.swapped)
        room.turned.addcmul_(room.swapped, sin)
        return room.columns(context.attend(self.attention, room.query, room.key, room.value, self.how))

    def add_to(self, stream: Tensor, attended: Tensor, room: MlpRoom) -> None:
        """stream (E, T), attended (H * D, T)"""
        stream.addmm_(self.output, attended)
        self.gate_up.put(stream, room.norm, room.gate_up)
        stream.addmm_(self.down, self.act(room.gate).mul_(room.up))


def _by_column(cos: Tensor, sin: Tensor) -> Tensor:
    """(P, D) each -> (2 * D, P): cos, then sin with its first half negated."""
    first, second = sin.t().chunk(2)
    return torch.cat((cos.t(), -first, second))


@dataclass(frozen=True)
class FlatForm:
    """What the parts do not tell, and what outlasts a change of weights.

    offset: whether a norm's factor is 1 + weight.
    hows:   how each layer attends.
    turns:  cos and sin of positions.
    """

    offset: bool
    hows: list[LayerOptions]
    turns: RotaryTable


class Rooms:
    """The stream (E, T) of T tokens, and where each layer computes; nothing in a room outlives the layer that uses it."""

    def __init__(self, layers: Sequence[Layer], stream: Tensor) -> None:
        self.stream = stream
        self.by_token = stream.t()[None]
        self.norm = NormRoom(self.stream)
        kinds = {layer.kind: layer for layer in layers}
        rooms = {
            kind: (AttentionRoom(layer, self.stream, self.norm), MlpRoom(layer, self.stream, self.norm))
            for kind, layer in kinds.items()
        }
        self.of_layers = [rooms[layer.kind] for layer in layers]


class FlatDecoder:
    """decoder: its weights must neither move nor change while this one is used."""

    @torch.no_grad()
    def __init__(self, decoder: Any, form: FlatForm) -> None:
        embedding, self._rotary, self._table = decoder.embed_tokens, decoder.rotary_emb, form.turns
        self._embed = embedding.forward
        self._vocabulary: Tensor | None = None  # (E, V) what the embedding gives for each token
        if isinstance(embedding, nn.Embedding) and embedding.weight.numel() <= LARGEST_COPY:
            self._vocabulary = self._embed(torch.arange(embedding.num_embeddings)[None])[0].t().contiguous()
        self._layers = [Layer.of(layer, how, form.offset) for layer, how in zip(decoder.layers, form.hows)]
        self._norm = Norm(decoder.norm, form.offset)
        self._rooms: Rooms | None = None
        self._window = torch.empty(0)
        self._window_turns: list[tuple[Tensor, ...]] = []

    def __call__(
        self, token_ids: Tensor, position_ids: Tensor, context: AttentionContext, wanted: Tensor | None = None
    ) -> Tensor:
        """(1, T) -> (T, E), or of the tokens `wanted`, which the last layer alone computes to its end.

        The result holds until the next call.
        """
        rooms = self._embedded(token_ids)
        stream, norm, last = rooms.stream, rooms.norm, self._layers[-1]
        cos, sin = self._turns(stream, position_ids, context)
        for layer, (attention_room, mlp_room) in zip(self._layers, rooms.of_layers):
            attended = layer.attend(stream, attention_room, cos, sin, context)
            if wanted is not None and layer is last:
                stream, attended = stream.index_select(1, wanted), attended.index_select(1, wanted)
                norm = NormRoom(stream)
                mlp_room = MlpRoom(layer, stream, norm)
            layer.add_to(stream, attended, mlp_room)
        return self._norm(stream, norm).t()

    def _embedded(self, token_ids: Tensor) -> Rooms:
        """Rooms for so many tokens, with these in the stream."""
        rooms = self._rooms
        if rooms is None or rooms.stream.shape[1] != token_ids.shape[1]:
            rooms = self._rooms = Rooms(self._layers, self._embed(token_ids)[0].t().contiguous())
        elif self._vocabulary is not None:
            torch.index_select(self._vocabulary, 1, token_ids[0], out=rooms.stream)
        else:
            rooms.by_token.copy_(self._embed(token_ids))
        return rooms

    def _turns(self, like: Tensor, position_ids: Tensor, context: AttentionContext) -> tuple[Tensor, ...]:
        """cos and sin of the positions; those of a window are looked up at its first step for all."""
        if not isinstance(context, WindowAttention):
            return self._table(self._rotary, like, position_ids).chunk(2)
        if self._window is not context.positions:
            self._window = context.positions
            turns = self._table(self._rotary, like, self._window.flatten()[None]).chunk(2)
            self._window_turns = list(zip(*(turn.unflatten(1, self._window.shape).unbind(1) for turn in turns)))
        return self._window_turns[context.step]


def flat_head(head: VocabularyHead) -> Callable[[Tensor], Tensor]:
    """The head as it computes fastest what a flat decoder gives; its weights must neither move nor change."""
    weight = head.weight_in(torch.float32)
    if weight is None or weight.numel() > LARGEST_COPY:
        return lambda hidden: head(hidden.contiguous())  # a few tokens as columns would take it several times as long
    return partial(torch.mm, mat2=weight.detach().t().contiguous())


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
    expected = Witness(PackedAttention([5], ids.device))
    hidden = own(ids, positions, expected)
    for offset in (False, True):
        form = FlatForm(offset, expected.hows, RotaryTable(_by_column, dim=1))
        got = Witness(PackedAttention([5], ids.device))
        try:
            same = agree(FlatDecoder(decoder, form)(ids, positions, got), hidden, 2.0)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None  # parts of the same names that want other arguments
        if same and all(agree(*pair, 2.0) for pair in zip(got.seen, expected.seen)):
            return replace(form, turns=RotaryTable(_by_column, dim=1))  # this table is as long as the farthest position
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
