"""A decoder's forward on the CPU without its modules: at small sizes they take longer than what they compute.

    embedding ─► [ norm ─► q, k, v ─► rotary ─► attention ─► += output ─► norm ─► gate, up ─► += down ]* ─► norm

A token is a column, but where heads are rows (`flat_heads.py`): the products then have the weights on the left, which the matrix
library does faster for few tokens, and add to the stream in place. What is computed on the way goes to rooms, tensors that are kept
with their views from one call to the next of as many tokens: to make them each time would take as long as to fill them.

For decoders of this form only: `flat_form` looks at the parts, and compares the result, and what every layer attends with, with
those of the model's own forward. The weights are looked up, small ones copied, when serving begins, and let go when it ends.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lockstep.engines.rollout.embedded import flat_parts
from lockstep.engines.rollout.embedded.flat_heads import HeadColumns, HeadRoom, HeadRows
from lockstep.engines.rollout.embedded.flat_parts import Norm, NormRoom, Product
from lockstep.models.attention import AttentionContext, LayerOptions, PackedAttention, Witness
from lockstep.models.fused_layers import agree
from lockstep.models.log_probs import VocabularyHead
from lockstep.models.paged_attention import WindowAttention
from lockstep.models.rotary_table import RotaryTable, stands_still

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""(1, T) tokens and positions, attention context -> (T, E) hidden states."""


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
    heads: HeadColumns | HeadRows
    output: Tensor
    gate_up: Product
    act: Callable[[Tensor], Tensor]
    down: Tensor

    @classmethod
    def of(cls, layer: Any, how: LayerOptions, form: "FlatForm") -> "Layer":
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            attention=attention,
            how=how,
            heads=form.heads(attention, Norm(layer.input_layernorm, form.offset), form.offset),
            output=attention.o_proj.weight.detach(),
            gate_up=Product(Norm(layer.post_attention_layernorm, form.offset), mlp.gate_proj, mlp.up_proj),
            act=mlp.act_fn.forward,
            down=mlp.down_proj.weight.detach(),
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind fit the same rooms."""
        return *self.heads.kind, *self.gate_up.sizes

    def attend(self, stream: Tensor, room: Any, rotation: Any, context: AttentionContext) -> Tensor:
        """stream (E, T), room and rotation as `heads` makes them -> (H * D, T)"""
        self.heads.fill(room, stream, rotation)
        return cast(HeadRoom, room).columns(context.attend(self.attention, room.query, room.key, room.value, self.how))

    def add_to(self, stream: Tensor, attended: Tensor, room: MlpRoom) -> None:
        """stream (E, T), attended (H * D, T)"""
        stream.addmm_(self.output, attended)
        self.gate_up.put(stream, room.norm, room.gate_up)
        stream.addmm_(self.down, self.act(room.gate).mul_(room.up))


@dataclass(frozen=True)
class FlatForm:
    """What the parts do not tell, and what outlasts a change of weights.

    offset: whether a norm's factor is 1 + weight.
    hows:   how each layer attends.
    heads:  how it computes what it attends with; table: what that needs for each position.
    """

    offset: bool
    hows: list[LayerOptions]
    heads: type[HeadColumns] | type[HeadRows]
    table: RotaryTable


class Rooms:
    """The stream (E, T) of T tokens, and where each layer computes; nothing in a room outlives the layer that uses it."""

    def __init__(self, layers: Sequence[Layer], stream: Tensor) -> None:
        self.stream = stream
        self.by_token = stream.t()[None]
        self.norm = NormRoom(self.stream)
        kinds = {layer.kind: layer for layer in layers}
        rooms = {
            kind: (layer.heads.room(self.stream, self.norm), MlpRoom(layer, self.stream, self.norm))
            for kind, layer in kinds.items()
        }
        self.of_layers = [rooms[layer.kind] for layer in layers]


class FlatDecoder:
    """decoder: its weights must neither move nor change while this one is used."""

    @torch.no_grad()
    def __init__(self, decoder: Any, form: FlatForm) -> None:
        embedding, self._rotary, self._form = decoder.embed_tokens, decoder.rotary_emb, form
        self._embed = embedding.forward
        self._vocabulary: Tensor | None = None  # (E, V) what the embedding gives for each token
        if isinstance(embedding, nn.Embedding) and embedding.weight.numel() <= flat_parts.LARGEST_COPY:
            self._vocabulary = self._embed(torch.arange(embedding.num_embeddings)[None])[0].t().contiguous()
        self._layers = [Layer.of(layer, how, form) for layer, how in zip(decoder.layers, form.hows)]
        self._norm = Norm(decoder.norm, form.offset)
        self._rooms: Rooms | None = None
        self._window = torch.empty(0)
        self._window_rotations: Sequence[Any] = []

    def __call__(
        self, token_ids: Tensor, position_ids: Tensor, context: AttentionContext, wanted: Tensor | None = None
    ) -> Tensor:
        """(1, T) -> (T, E), or of the tokens `wanted`, which the last layer alone computes to its end.

        The result holds until the next call.
        """
        rooms = self._embedded(token_ids)
        stream, norm, last = rooms.stream, rooms.norm, self._layers[-1]
        rotation = self._rotation(stream, position_ids, context)
        for layer, (head_room, mlp_room) in zip(self._layers, rooms.of_layers):
            attended = layer.attend(stream, head_room, rotation, context)
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

    def _rotation(self, like: Tensor, position_ids: Tensor, context: AttentionContext) -> Any:
        """By what the heads of each token are turned; for a window looked up at its first step for all."""
        if not isinstance(context, WindowAttention):
            return self._looked_up(like, position_ids)[0]
        if self._window is not context.positions:
            self._window = context.positions
            self._window_rotations = self._looked_up(like, context.positions)
        return self._window_rotations[context.step]

    def _looked_up(self, like: Tensor, positions: Tensor) -> Sequence[Any]:
        """(steps, T)"""
        found = self._form.table(self._rotary, like, positions.flatten()[None])
        return self._form.heads.by_step(found, len(positions))


def flat_head(head: VocabularyHead) -> Callable[[Tensor], Tensor]:
    """The head as it computes fastest what a flat decoder gives; its weights must neither move nor change."""
    weight = head.weight_in(torch.float32)
    if weight is None or weight.numel() > flat_parts.LARGEST_COPY:
        return lambda hidden: head(hidden.contiguous())  # a few tokens as columns would take it several times as long
    return partial(torch.mm, mat2=weight.detach().t().contiguous())


@torch.no_grad()
def flat_form(decoder: Any, own: Forward) -> FlatForm | None:
    """The form in which a flat forward computes what the decoder's own does; None where there is none."""
    names = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if set(dict(decoder.named_children())) != names or not all(_is_usual(layer) for layer in decoder.layers):
        return None
    if not stands_still(decoder.rotary_emb, torch.zeros(0, dtype=decoder.embed_tokens.weight.dtype)):
        return None
    ids, last = torch.arange(5)[None], decoder.config.max_position_embeddings - 1
    positions = torch.tensor([[0, 1, 2, last // 2, last]])  # some layers do otherwise from a far position on
    expected = Witness(PackedAttention([5], ids.device))
    hidden = own(ids, positions, expected)
    heads = HeadRows if all(HeadRows.fits(layer.self_attn) for layer in decoder.layers) else HeadColumns
    for offset in (False, True):
        form = FlatForm(offset, expected.hows, heads, heads.table())
        got = Witness(PackedAttention([5], ids.device))
        try:
            same = agree(FlatDecoder(decoder, form)(ids, positions, got), hidden, 2.0)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            logger.debug("%s decodes by its own forward", type(decoder).__name__, exc_info=True)
            return None  # parts of the same names that want other arguments
        if same and all(agree(*pair, 2.0) for pair in zip(_seen(got, heads.as_they_were), expected.seen)):
            return replace(form, table=heads.table())  # this table is as long as the farthest position
    return None


def _seen(witness: Witness, as_they_were: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    for query, key, value in zip(*[iter(witness.seen)] * 3):
        yield from (as_they_were(query), as_they_were(key), value)


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
