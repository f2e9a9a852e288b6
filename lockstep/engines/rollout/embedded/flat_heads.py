"""What a layer attends with, computed on the CPU without its modules, in two ways.

    HeadColumns: norm ─► product ─► norms of heads ─► cos and sin, a token in each column
    HeadRows:    norm ─► product ─► complex numbers, a token in each row

Rows take fewer calls, but copies of the weights: they are for small models, whose calls take longer than what they compute.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded import flat_parts
from lockstep.engines.rollout.embedded.flat_parts import Norm, NormRoom, Product
from lockstep.models.rotary_table import RotaryTable, as_numbers, pair_order

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class HeadRoom:
    """What layers of one kind attend with: query, key and value are (1, H, T, D)."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __init__(self, norm: NormRoom) -> None:
        self.norm = norm
        self._out, self._columns = torch.empty(0), torch.empty(0)

    def columns(self, out: Tensor) -> Tensor:
        """(1, T, H, D) -> (H * D, T); a window gives its results in the same tensor each time."""
        if out is not self._out:
            self._out, self._columns = out, out.flatten(2)[0].t()
        return self._columns


class ColumnRoom(HeadRoom):
    def __init__(self, of: "HeadColumns", stream: Tensor, norm: NormRoom) -> None:
        super().__init__(norm)
        qkv = stream.new_empty(sum(of.num_heads), of.head_dim, stream.shape[1])
        self.qkv = of.product.places_in(qkv.flatten(0, 1))
        *heads, values = qkv.split(of.num_heads)
        self.normed = heads if of.norms else []
        self.norms = [NormRoom(part) for part in self.normed]
        self.heads = qkv[: -of.num_heads[2]]
        self.swapped, self.turned = torch.empty_like(self.heads), torch.empty_like(self.heads)
        turned = self.turned.split(of.num_heads[:2])
        self.query, self.key, self.value = (part.transpose(1, 2)[None] for part in (*turned, values))


class HeadColumns:
    def __init__(self, attention: Any, norm: Norm, offset: bool) -> None:
        self.head_dim, self.num_heads = attention.head_dim, _num_heads(attention)
        self.product = Product(norm, *(getattr(attention, name) for name in PROJECTIONS))
        norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        self.norms = [Norm(module, offset) for module in norms]
        self.kind = (self.head_dim, *self.num_heads, *self.product.sizes, len(norms))
        self._swapped = torch.arange(self.head_dim).roll(self.head_dim // 2)

    def room(self, stream: Tensor, norm: NormRoom) -> ColumnRoom:
        return ColumnRoom(self, stream, norm)

    def fill(self, room: ColumnRoom, stream: Tensor, cos_and_sin: Sequence[Tensor]) -> None:
        """stream: (E, T)"""
        cos, sin = cos_and_sin
        self.product.put(stream, room.norm, room.qkv)
        for norm, heads, norm_room in zip(self.norms, room.normed, room.norms):
            heads.copy_(norm(heads, norm_room))
        torch.mul(room.heads, cos, out=room.turned)
        torch.index_select(room.heads, 1, self._swapped, out=room.swapped)
        room.turned.addcmul_(room.swapped, sin)

    @staticmethod
    def table() -> RotaryTable:
        return RotaryTable(_cos_and_sin, dim=1)

    @staticmethod
    def by_step(found: Tensor, num_steps: int) -> list[tuple[Tensor, ...]]:
        """What the table gave for the tokens of all steps -> cos and sin (D, T) of each, the first half of sin negated."""
        return list(zip(*(part.unflatten(1, (num_steps, -1)).unbind(1) for part in found.chunk(2))))

    @staticmethod
    def as_they_were(heads: Tensor) -> Tensor:
        """Queries or keys (..., D) in the order that the model has."""
        return heads


def _cos_and_sin(cos: Tensor, sin: Tensor) -> Tensor:
    """(P, D) each -> (2 * D, P): cos, then sin with its first half negated."""
    first, second = sin.t().chunk(2)
    return torch.cat((cos.t(), -first, second))


class RowRoom(HeadRoom):
    def __init__(self, of: "HeadRows", stream: Tensor, norm: NormRoom) -> None:
        super().__init__(norm)
        self.normed = norm.wide.t()
        self.rows = stream.new_empty(stream.shape[1], sum(of.num_heads) * of.head_dim)
        heads = self.rows.unflatten(1, (-1, of.head_dim))
        self.turned = torch.view_as_complex(heads.unflatten(2, (-1, 2)))[:, : -of.num_heads[2]]
        self.query, self.key, self.value = (part.transpose(0, 1)[None] for part in heads.split(of.num_heads, 1))


class HeadRows:
    """Elements of queries and keys that are turned together lie side by side: `pair_order`.

    offset: that of norms of heads, of which such a layer has none.
    """

    def __init__(self, attention: Any, norm: Norm, offset: bool) -> None:
        self.head_dim, self.num_heads = attention.head_dim, _num_heads(attention)
        self.kind = (self.head_dim, *self.num_heads)
        self._normed = norm.without_factor
        linears = [getattr(attention, name) for name in PROJECTIONS]
        order = _paired_rows(sum(self.num_heads), self.num_heads[2], self.head_dim)
        weight = torch.cat([m.weight.detach() for m in linears]).index_select(0, order)
        biases = [m.bias.detach() for m in linears if m.bias is not None]
        self._weight = weight.mul_(norm.factor).t().contiguous()
        self._bias = torch.cat(biases).index_select(0, order) if biases else None

    @staticmethod
    def fits(attention: Any) -> bool:
        linears = [getattr(attention, name) for name in PROJECTIONS]
        return (
            not hasattr(attention, "q_norm")
            and attention.head_dim % 2 == 0
            and all(m.weight.dtype == torch.float32 for m in linears)
            and sum(m.weight.numel() for m in linears) <= flat_parts.LARGEST_COPY
            and len({m.bias is None for m in linears}) == 1
        )

    def room(self, stream: Tensor, norm: NormRoom) -> RowRoom:
        return RowRoom(self, stream, norm)

    def fill(self, room: RowRoom, stream: Tensor, numbers: Tensor) -> None:
        """stream: (E, T)"""
        self._normed(stream, room.norm)
        if self._bias is None:
            torch.mm(room.normed, self._weight, out=room.rows)
        else:
            torch.addmm(self._bias, room.normed, self._weight, out=room.rows)
        room.turned.mul_(numbers)

    @staticmethod
    def table() -> RotaryTable:
        return RotaryTable(as_numbers, dim=0)

    @staticmethod
    def by_step(found: Tensor, num_steps: int) -> list[Tensor]:
        """What the table gave for the tokens of all steps -> (T, 1, D / 2) complex of each."""
        return list(torch.view_as_complex(found.view(num_steps, -1, 1, found.shape[1] // 2, 2)).unbind(0))

    @staticmethod
    def as_they_were(heads: Tensor) -> Tensor:
        """Queries or keys (..., D) in the order that the model has."""
        return heads[..., pair_order(heads.shape[-1]).argsort()]


@cache
def _paired_rows(num_heads: int, num_values: int, head_dim: int) -> Tensor:
    """The order of the rows of all heads' weights in which those of queries and keys are paired."""
    heads = torch.arange(num_heads * head_dim).view(num_heads, head_dim)
    return torch.cat((heads[:-num_values, pair_order(head_dim)], heads[-num_values:])).flatten()


def _num_heads(attention: Any) -> list[int]:
    """Of queries, keys and values."""
    return [getattr(attention, name).out_features // attention.head_dim for name in PROJECTIONS]
