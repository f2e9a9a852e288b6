"""Attention of decode steps on the CPU.

    gather each layer's keys and values once ─► [ write one column, attend ] per step ─► write the new ones back to the cache
    gather each layer's states once ─► [ one token per row ] per step ─► write them back to their slots

Legend: n rows, C columns, H query heads, HK key heads, G = H / HK, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.engines.rollout.embedded.paged_attention import (
    PagedCache,
    as_cached,
    blocks_of_heads,
    movable,
    rows_of_heads,
    slots_of_heads,
)
from lockstep.kernels.exact import is_exact
from lockstep.models.attention import additive_mask
from lockstep.models.exact_attention import exact_attention
from lockstep.models.latent_attention import LatentKeys
from lockstep.models.layer_options import LayerOptions
from lockstep.models.state_rows import RowStates, StateCore


class CpuDecodeAttention:
    """The attention context of a window of decode steps.

    tables:    blocks of each row, including those that the steps will fill; sorted by length, shortest first.
    positions: (steps, N) position of each row's new token in each step; all earlier tokens are in the cache. Not all steps need
               to be run. A finished row repeats its last position; its output is ignored.
    slots:     (N,) state slots of the rows; None if no layer has a state.
    """

    def __init__(
        self, cache: PagedCache, tables: Sequence[Sequence[int]], positions: Tensor, slots: Tensor | None = None
    ) -> None:
        self.positions = positions
        self._state_slots = slots
        self._store = cache.states
        self._states: dict[int, RowStates] = {}  # by layer_idx
        self.step = -1
        self._groups = [
            _RowGroup(cache, slice(start, stop), tables[start:stop], positions[:, start:stop])
            for start, stop in similar_lengths(tables)
        ]

    def begin(self) -> None:
        """To be called before each step."""
        self.step += 1
        for group in self._groups:
            group.masks.clear()

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        index: int = layer.layer_idx  # type: ignore[assignment]
        outputs = []
        for group in self._groups:
            q, k, v = (t[0, :, group.rows] for t in (query, key, value))
            own = options
            if options.index is not None:
                own = replace(options, index=options.index.tokens(group.rows).rows(q.shape[1]))
            outputs.append(group.attend(index, self.step, q, k, v, own))
        return torch.cat(outputs)[None]

    def attend_latent(self, layer: nn.Module, query: Tensor, keys: LatentKeys, options: LayerOptions) -> Tensor:
        return keys.project(self.attend(layer, keys.absorb(query), *keys.join(options.index), options))

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        assert self._store is not None and self._state_slots is not None
        index: int = layer.layer_idx  # type: ignore[assignment]
        if index not in self._states:
            self._states[index] = self._store.read(index, self._state_slots)
        return core(x.transpose(0, 1), self._states[index]).transpose(0, 1)

    def write_back(self) -> None:
        """Write the keys and values of all steps, and the states after the last of them, to the cache."""
        for group in self._groups:
            group.write_back(self.step + 1)
        for index, states in self._states.items():
            assert self._store is not None and self._state_slots is not None
            self._store.write(index, self._state_slots, states)


def similar_lengths(tables: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(start, stop) of tables to pad together: some padding costs less than more calls. Shorter tables come first."""
    bounds = []
    start = 0
    for stop, table in enumerate(tables):
        shortest = len(tables[start])
        if len(table) > shortest + max(4, shortest // 2):
            bounds.append((start, stop))
            start = stop
    return [*bounds, (start, len(tables))]


class _RowGroup:
    """Rows of similar length, with the gathered keys and values (n, HK, C, D) of each layer: a column per position.

    They are in the model's dtype, with the values that the cache holds. A step writes one column of each row. Those after a row's
    position hold anything and are hidden.
    """

    def __init__(self, cache: PagedCache, rows: slice, tables: Sequence[Sequence[int]], positions: Tensor) -> None:
        self.cache = cache
        self.rows = rows
        self.positions = positions
        width = max(len(table) for table in tables)
        self.table = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables])
        self.masks: dict[tuple[int | None, int | None], Tensor | None] = {}
        self._row = torch.arange(len(tables))
        self._lengths: list[int] = (positions.amax(1) + 1).tolist()  # of the longest row in each step
        self._stores: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, index: int, step: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """query (H, n, D), key and value (HK, n, D) of the new tokens of layer `index` -> (n, H, D)."""
        if index not in self._stores:
            self._stores[index] = self._gather(index, key.dtype)
        position = self.positions[step]
        cached = self.cache.layers[index].dtype
        for store, new in zip(self._stores[index], (key, value)):
            store[self._row, :, position] = as_cached(new.transpose(0, 1), cached).to(store.dtype)
        keys, values = self._stores[index]
        length = self._lengths[step]
        keys, values = keys[:, :, :length], values[:, :, :length]
        if is_exact():
            return exact_attention(query.transpose(0, 1)[:, :, None], keys, values, position[:, None], options)[:, :, 0]
        # the G query heads of a key head are G queries, so that keys are not repeated
        q = query.transpose(0, 1).contiguous().unflatten(1, (len(key), -1))  # (n, HK, G, D)
        if options.index is None:
            mask = self._mask(step, options, query.dtype)
        else:
            keys, scored = options.index.split_keys(keys, query.shape[-1])
            unpicked = options.index.hide_others(scored, self._hidden(step, options)[:, None])
            mask = additive_mask(unpicked, query.dtype)[:, None]
        if values.shape[-1] == 0:  # latents
            values = keys
        if options.softcap is None and options.sinks is None:
            out = F.scaled_dot_product_attention(q, keys, values, mask, scale=options.scaling)
            return out.flatten(1, 2)
        scores = q @ keys.transpose(2, 3) * options.scaling
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if mask is not None:
            scores = scores + mask
        if options.sinks is not None:
            sinks = options.sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
            scores = torch.cat([scores, sinks], -1)
        return (scores.softmax(-1)[..., :length] @ values).flatten(1, 2)

    def write_back(self, num_steps: int) -> None:
        size = self.cache.block_size
        positions = self.positions[:num_steps]  # (steps, n)
        slots = (self.table.T.gather(0, positions // size) * size + positions % size).flatten()
        for index, stores in self._stores.items():
            target = slots_of_heads(slots, stores[0].shape[1], size)
            for store, gathered in zip((self.cache.keys[index], self.cache.values[index]), stores):
                tokens = as_cached(gathered[self._row, :, positions], store.dtype)  # (steps, n, HK, D)
                movable(store).flatten(0, 1).index_copy_(0, target, movable(tokens).flatten(0, 2))

    def _gather(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        num_rows, num_heads = len(self.table), self.cache.layers[index].num_heads
        num_columns = max(self._lengths)
        blocks = blocks_of_heads(self.table[:, : -(-num_columns // self.cache.block_size)], num_heads)
        keys, values = (
            rows_of_heads(store, blocks, num_rows, num_heads, dtype)
            for store in (self.cache.keys[index], self.cache.values[index])
        )
        return keys, values

    def _mask(self, step: int, options: LayerOptions, dtype: torch.dtype) -> Tensor | None:
        """(n, 1, 1, columns): 0 if the row sees the token, else -inf; None if every row sees all."""
        if options.extent not in self.masks:
            hidden = self._hidden(step, options)
            self.masks[options.extent] = additive_mask(hidden, dtype)[:, None, None] if bool(hidden.any()) else None
        return self.masks[options.extent]

    def _hidden(self, step: int, options: LayerOptions) -> Tensor:
        """(n, columns): whether the row may not see the token."""
        hidden: Tensor = options.hides(self.positions[step, :, None], torch.arange(self._lengths[step]))
        return hidden
