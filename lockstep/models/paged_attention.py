"""Attention over a KV cache of blocks, for decoding with the trainer's own modules.

    step of T tokens ─► write their keys and values to their slots ─► each row attends to the blocks of its table

Tokens of one step lie end to end in a row: first those of sequences that have tokens in the cache already (`CachedRows`),
then those of sequences that begin here, which see nothing but each other and go through `PackedAttention`.
Legend: T tokens of the step, N rows, Q new tokens of a row, L cached places of a row, H query heads, HK key heads,
G = H / HK.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.attention import LayerOptions, PackedAttention, refuse_softcap
from lockstep.utils.device import to_device


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer puts into the cache for a token."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class LayerProbe:
    """An attention context that notes the shape of every layer in one forward of one token: `layers` by `layer_idx`."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        refuse_softcap(how.softcap)
        if hasattr(layer, "sinks"):
            raise ValueError("attention with sinks is not supported")
        index = getattr(layer, "layer_idx", None)
        if index is None or index in self.layers:
            raise ValueError(f"{type(layer).__name__} has no layer_idx of its own")
        self.layers[index] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype, how.sliding_window)
        groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(groups, 1).transpose(1, 2)  # one token sees itself


class PagedCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens in every layer.

    Each layer holds one tensor (num_blocks * HK, block_size, D) for keys and one for values: the tokens of a block and head
    lie together, so that picking a table's blocks gives (N, HK, L, D) at once.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.layers = dict(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for index, shape in self.layers.items():
            rows = num_blocks * shape.num_heads
            # zeros: masked places are multiplied by 0, which leftover NaN would survive
            self.keys[index] = torch.zeros(rows, block_size, shape.key_dim, dtype=shape.dtype, device=device)
            self.values[index] = torch.zeros(rows, block_size, shape.value_dim, dtype=shape.dtype, device=device)

    def grow(self, num_blocks: int) -> None:
        """Add empty blocks until there are `num_blocks`; the present ones keep their content."""
        for index, shape in self.layers.items():
            added = (num_blocks - self.num_blocks) * shape.num_heads
            for store in (self.keys, self.values):
                old = store[index]
                store[index] = torch.cat([old, old.new_zeros(added, *old.shape[1:])])
        self.num_blocks = num_blocks

    def addresses(self) -> Tensor:
        """(layers, 2) on the host: where the keys and the values of each layer begin, by `layer_idx`."""
        table = torch.zeros(max(self.layers) + 1, 2, dtype=torch.int64)
        for index in self.layers:
            table[index] = torch.tensor([self.keys[index].data_ptr(), self.values[index].data_ptr()])
        return table

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in all layers: (source, target) pairs."""
        if not copies:
            return
        pairs = to_device(torch.tensor(copies), self.device)  # (N, 2)
        for index, shape in self.layers.items():
            heads = torch.arange(shape.num_heads, device=self.device)
            source, target = (pairs[:, i, None] * shape.num_heads + heads for i in (0, 1))
            for store in (self.keys[index], self.values[index]):
                store[target.flatten()] = store[source.flatten()]


def slots_of_heads(slots: Tensor, num_heads: int, block_size: int) -> Tensor:
    """(T,) slots -> (T * HK,) place of each token and head in a layer's tensor seen as (num_blocks * HK * block_size, D)."""
    heads = torch.arange(num_heads, device=slots.device)
    block, offset = slots[:, None] // block_size, slots[:, None] % block_size
    return ((block * num_heads + heads) * block_size + offset).flatten()


def similar_lengths(tables: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(start, stop) of tables that are padded together: more calls cost more than some padding. Shorter tables come first."""
    bounds, start = [], 0
    for stop, table in enumerate(tables):
        shortest = len(tables[start])
        if len(table) > shortest + max(4, shortest // 2):
            bounds.append((start, stop))
            start = stop
    return [*bounds, (start, len(tables))]


class CachedRows:
    """N rows of the same number of new tokens, with their blocks.

    first:     index of their first token in the step; the rows' tokens follow each other.
    table:     (N, nb) blocks of each row, padded with any block at the end.
    positions: (N, Q) place of each new token in its sequence.
    """

    def __init__(self, first: int, table: Tensor, positions: Tensor) -> None:
        self.first = first
        self.table = table
        self.positions = positions
        self.num_tokens = positions.numel()
        self._gather_index: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def gather_index(self, num_heads: int) -> Tensor:
        """Rows of the cache tensor that hold these tables: flat (N, HK, nb)."""
        if num_heads not in self._gather_index:
            heads = torch.arange(num_heads, device=self.table.device)
            self._gather_index[num_heads] = (self.table[:, None] * num_heads + heads[:, None]).flatten()
        return self._gather_index[num_heads]

    def mask(self, length: int, groups: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """(N, 1, Q * G, L): 0 where a token may look, -inf elsewhere."""
        if (groups, window) not in self._masks:
            place = torch.arange(length, device=self.table.device)
            position = self.positions.repeat_interleave(groups, 1)[:, :, None]
            hidden = place > position
            if window is not None:
                hidden |= place <= position - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[groups, window] = mask[:, None]
        return self._masks[groups, window]


class PagedAttention:
    """The attention context of one step.

    slots:         (T,) place of each token in the cache, block * block_size + offset.
    cached:        the rows that have tokens in the cache already; together they are the first tokens of the step.
    fresh_lengths: tokens of each sequence that begins in this step.
    """

    def __init__(
        self, cache: PagedCache, slots: Tensor, cached: Sequence[CachedRows], fresh_lengths: Sequence[int]
    ) -> None:
        self.cache = cache
        self.cached = cached
        self.num_cached = sum(rows.num_tokens for rows in cached)
        self.fresh = PackedAttention(fresh_lengths, slots.device) if fresh_lengths else None
        self._slots = slots
        self._head_slots: dict[int, Tensor] = {}

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        refuse_softcap(how.softcap)
        index: int = layer.layer_idx  # type: ignore[assignment]
        keys, values = self.cache.keys[index], self.cache.values[index]
        num_heads = key.shape[1]
        self._write(keys, key)
        self._write(values, value)

        outputs = [self._attend_cached(rows, query[0], keys, values, num_heads, how) for rows in self.cached]
        if self.fresh is not None:
            q, k, v = (t[:, :, self.num_cached :] for t in (query, key, value))
            out = self.fresh.attend(layer, q, k, v, how)
            outputs.append(out[0])
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def _write(self, store: Tensor, new: Tensor) -> None:
        """Put the new keys or values (1, HK, T, D) into their slots."""
        if store.is_cuda:
            from lockstep.kernels.paged_decode import write_to_cache

            write_to_cache(new, store, self._slots, self.cache.block_size)
        else:
            slots = self._slots_of_heads(new.shape[1])
            store.view(-1, store.shape[-1]).index_copy_(0, slots, new[0].transpose(0, 1).flatten(0, 1))

    def _slots_of_heads(self, num_heads: int) -> Tensor:
        if num_heads not in self._head_slots:
            self._head_slots[num_heads] = slots_of_heads(self._slots, num_heads, self.cache.block_size)
        return self._head_slots[num_heads]

    @staticmethod
    def _attend_cached(
        rows: CachedRows,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
        how: LayerOptions,
    ) -> Tensor:
        """query (H, T, D) of the whole step -> (N * Q, H, D) of these rows.

        The G query heads of a key head are taken as G more queries, so that keys are not repeated.
        """
        num_rows, length_q = rows.positions.shape
        groups = query.shape[0] // num_heads
        length = rows.table.shape[1] * keys.shape[1]
        index = rows.gather_index(num_heads)
        k = keys.index_select(0, index).view(num_rows, num_heads, length, -1)
        v = values.index_select(0, index).view(num_rows, num_heads, length, -1)
        q = query[:, rows.first : rows.first + rows.num_tokens].transpose(0, 1)
        q = q.reshape(num_rows, length_q, num_heads, groups, -1).transpose(1, 2).flatten(2, 3)  # (N, HK, Q * G, D)
        mask = rows.mask(length, groups, how.sliding_window, query.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scaling)
        return (
            out.view(num_rows, num_heads, length_q, groups, -1)
            .transpose(1, 2)
            .reshape(rows.num_tokens, num_heads * groups, -1)
        )


class WindowAttention:
    """The attention context of some steps of one token per row on the CPU.

    The rows' keys and values are gathered when a layer first attends and go back to the cache at the end. Those of one step lie in
    one column of all rows, behind the longest row: so what a row sees stays the same but for one column more a step.

    tables:    blocks of each row, with those that the steps will fill; shorter tables come first.
    positions: (steps, N) place of each row's new token in the steps to come, of which the last need not be taken; all before the
               first are in the cache. A row that stays at its place gets nothing useful from then on.
    """

    def __init__(self, cache: PagedCache, tables: Sequence[Sequence[int]], positions: Tensor) -> None:
        self.positions = positions
        self.step = -1
        self._groups = [
            _GatheredRows(cache, slice(start, stop), tables[start:stop], positions[:, start:stop])
            for start, stop in similar_lengths(tables)
        ]

    def begin(self) -> None:
        """Before each step."""
        self.step += 1
        for group in self._groups:
            group.begin(self.step)

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        refuse_softcap(how.softcap)
        index: int = layer.layer_idx  # type: ignore[assignment]
        if len(self._groups) == 1:
            return self._groups[0].attend(index, query, key, value, how)
        parts = [(g, query[:, :, g.rows], key[:, :, g.rows], value[:, :, g.rows]) for g in self._groups]
        return torch.cat([group.attend(index, q, k, v, how) for group, q, k, v in parts], 1)

    def write_back(self) -> None:
        """Put the keys and values of the steps into the cache."""
        for group in self._groups:
            group.write_back()


class _Gathered(NamedTuple):
    """Keys (n * HK, D, C) and values (n * HK, C, D) of one layer.

    mask:                 what `_mask` gives; None where it changes from step to step.
    new_keys, new_values: the column of each step as (1, HK, n, D).
    room:                 for what the step computes.
    """

    keys: Tensor
    values: Tensor
    mask: tuple[Tensor, int] | None
    new_keys: tuple[Tensor, ...]
    new_values: tuple[Tensor, ...]
    room: "_StepRoom"


class _StepRoom:
    """Queries and outputs (n * HK, G, D) of a step, which layers of one shape share; query and output: as the layer has them."""

    def __init__(self, num_key_heads: int, query: Tensor, value_dim: int) -> None:
        """query: (1, H, n, D)"""
        _, num_heads, num_rows, head_dim = query.shape
        queries = query.new_empty(num_rows, num_heads, head_dim)
        outputs = query.new_empty(num_rows, num_heads, value_dim)
        self.query, self.output = queries.transpose(0, 1)[None], outputs[None]
        self.queries, self.outputs = (t.unflatten(1, (num_key_heads, -1)).flatten(0, 1) for t in (queries, outputs))


class _GatheredRows:
    """Rows of similar length, with keys and values of every layer that has attended.

    The C columns are those of the cached tokens of the longest row, then one for each step.
    """

    def __init__(self, cache: PagedCache, rows: slice, tables: Sequence[Sequence[int]], positions: Tensor) -> None:
        self.cache = cache
        self.rows = rows
        self.positions = positions
        width = max(len(table) for table in tables)
        self.table = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables])
        self.num_cached = int(positions[0].max())
        self.num_columns = self.num_cached + len(positions)
        self._step = -1
        length, place = positions[0][:, None], torch.arange(self.num_columns)
        # (n, C) place of each column's token in its sequence, and whether there is one
        self._places = torch.where(place < self.num_cached, place, place - self.num_cached + length)
        self._empty = (place >= length) & (place < self.num_cached)
        self._masks: dict[tuple[int, int | None], tuple[Tensor, int]] = {}
        self._stores: dict[int, _Gathered] = {}
        self._rooms: dict[tuple[int, ...], _StepRoom] = {}

    def begin(self, step: int) -> None:
        self._step = step
        self._masks.clear()

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        """query (1, H, n, D), key and value (1, HK, n, D) of the new tokens -> (1, n, H, D).

        The G query heads of a key head are taken as G queries, so that keys are not repeated.
        """
        stored = self._stores.get(index) or self._gather(index, query, how)
        stored.new_keys[self._step].copy_(key)
        stored.new_values[self._step].copy_(value)
        room = stored.room
        room.query.copy_(query)
        seen = self.num_cached + self._step + 1
        keys, values = stored.keys.narrow(2, 0, seen), stored.values.narrow(1, 0, seen)
        mask, beta = stored.mask or self._mask(key.shape[1], how.sliding_window, query.dtype)
        if beta:
            mask = mask.narrow(2, 0, seen)
        scores = torch.baddbmm(mask, room.queries, keys, beta=beta, alpha=how.scaling)
        torch.bmm(scores.softmax(-1), values, out=room.outputs)
        return room.output

    def write_back(self) -> None:
        size, taken = self.cache.block_size, slice(self._step + 1)
        positions = self.positions[taken]
        slots = (self.table.T.gather(0, positions // size) * size + positions % size).flatten()
        for index, stored in self._stores.items():
            target = slots_of_heads(slots, self.cache.layers[index].num_heads, size)
            for store, columns in (
                (self.cache.keys[index], stored.new_keys[taken]),
                (self.cache.values[index], stored.new_values[taken]),
            ):
                tokens = torch.cat(columns).transpose(1, 2)  # (steps, n, HK, D)
                store.view(-1, store.shape[-1]).index_copy_(0, target, tokens.flatten(0, 2))

    def _gather(self, index: int, query: Tensor, how: LayerOptions) -> _Gathered:
        num_rows, num_heads, cached = len(self.table), self.cache.layers[index].num_heads, slice(self.num_cached)
        table = self.table[:, : -(-self.num_cached // self.cache.block_size)]
        blocks = (table[:, None] * num_heads + torch.arange(num_heads)[:, None]).flatten()
        old_keys, old_values = (
            store.index_select(0, blocks).view(num_rows, num_heads, -1, store.shape[-1])[:, :, cached]
            for store in (self.cache.keys[index], self.cache.values[index])
        )
        keys = old_keys.new_empty(num_rows, num_heads, old_keys.shape[-1], self.num_columns)
        values = old_values.new_empty(num_rows, num_heads, self.num_columns, old_values.shape[-1])
        keys[..., cached] = old_keys.transpose(2, 3)
        values[:, :, cached] = old_values
        kind = num_heads, *query.shape, values.shape[3]
        if kind not in self._rooms:
            self._rooms[kind] = _StepRoom(num_heads, query, values.shape[3])
        self._stores[index] = _Gathered(
            keys.flatten(0, 1),
            values.flatten(0, 1),
            mask=self._mask(num_heads, None, query.dtype) if how.sliding_window is None else None,
            new_keys=keys[..., self.num_cached :].transpose(0, 1)[None].unbind(4),
            new_values=values[:, :, self.num_cached :].transpose(0, 1)[None].unbind(3),
            room=self._rooms[kind],
        )
        return self._stores[index]

    def _mask(self, num_heads: int, window: int | None, dtype: torch.dtype) -> tuple[Tensor, int]:
        """(n * HK, 1, C): 0 where a row may look, -inf elsewhere; and the factor with which to add it.

        Where it hides nothing, it is a single 0, and the factor 0.
        """
        if (num_heads, window) not in self._masks:
            hidden = self._empty
            if window is not None:
                position = self.positions[self._step, :, None]
                hidden = hidden | (self._places <= position - window)
            hides = bool(hidden.any())
            hidden = hidden.repeat_interleave(num_heads, 0)[:, None] if hides else hidden.new_zeros(1, 1, 1)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._masks[num_heads, window] = mask, int(hides)
        return self._masks[num_heads, window]


class DecodeAttention:
    """The attention context of a step of one token per row on CUDA, in buffers whose content changes from step to step.

    addresses:        (layers, 2) where the cache's keys and values begin.
    tables:           (seats, width) blocks; rows (T,) the seat of each row.
    positions, slots: (T,) place of each new token in its sequence, and in the cache (-1: it is not kept).
    splits:           number of stretches per row and key head, given how many of these there are.
    """

    def __init__(
        self,
        addresses: Tensor,
        block_size: int,
        tables: Tensor,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        splits: Callable[[int], int],
    ) -> None:
        from lockstep.kernels.paged_decode import decode_attention

        self._attend = decode_attention
        self.addresses, self.block_size = addresses, block_size
        self.tables, self.rows, self.positions, self.slots = tables, rows, positions, slots
        self.splits = splits

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        refuse_softcap(how.softcap)
        return self._attend(
            query,
            key,
            value,
            self.addresses[layer.layer_idx],  # type: ignore[index]
            self.tables,
            self.rows,
            self.positions,
            self.slots,
            scale=how.scaling,
            window=how.sliding_window,
            block_size=self.block_size,
            splits=self.splits(key.shape[1] * key.shape[2]),
        )
