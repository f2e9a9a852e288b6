"""The paged KV cache, and attention over it for prefill and mixed steps, on CPU and CUDA.

    step of T tokens ─► write their keys and values to their cache slots ─► each row attends to the blocks of its table

The tokens of a step are concatenated: first those of sequences with tokens in the cache (`CachedRows`), then those of new
sequences, which see only each other and go through `PackedAttention`.
A cache in 8 bits holds float8_e4m3fn without scales. Readers see the rounded keys and values, also of their own
token; new sequences see each other's as they were computed.
Legend: T tokens of the step, N rows, Q new tokens per row, L cached tokens per row, H query heads, HK key heads, G = H / HK.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.engines.rollout.embedded.state_slots import LayerStates, PrefillStates, StateShape, StateSlots
from lockstep.kernels import fp8
from lockstep.kernels.exact import is_exact
from lockstep.models.attention import PackedAttention, additive_mask, eager_attention
from lockstep.models.exact_attention import exact_attention
from lockstep.models.latent_attention import LatentKeys
from lockstep.models.layer_options import LayerOptions
from lockstep.models.state_rows import RowStates, StateCore, StateName
from lockstep.utils.device import to_device

MAX_MASK = 1 << 28
"""Most entries of the mask of `CachedRows`, 512 MiB in half precision: longer chunks of a prompt attend in parts."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer caches per token, and how it attends.

    value_dim: 0 if the keys are the values too (`LatentKeys`).
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int | None = None
    is_indexed: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class RouteShape:
    """Experts that are recorded per token: `top_k` numbers of `dtype` in each of `num_layers` layers with experts."""

    num_layers: int
    top_k: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize


class LayerProbe:
    """An attention context that records what each layer keeps of a forward of one token, by `layer_idx`.

    layers: shapes of keys and values. states: shapes of states. A layer may have both.
    continues: whether all layers can compute several tokens at a time from a state on.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.states: dict[int, dict[StateName, StateShape]] = {}
        self.continues = True

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        index = _unique_index(layer, self.layers)
        window, is_indexed = options.sliding_window, options.index is not None
        self.layers[index] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype, window, is_indexed)
        groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(groups, 1).transpose(1, 2)  # only the shape matters

    def attend_latent(self, layer: nn.Module, query: Tensor, keys: LatentKeys, options: LayerOptions) -> Tensor:
        self.attend(layer, keys.absorb(query), *keys.join(options.index), options)
        return keys.expand()[1].transpose(1, 2)

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        states = RowStates()
        out = core(x, states)
        if not states.tensors:
            name = type(getattr(layer, "reference", layer)).__name__
            raise ValueError(f"{name} keeps its state to itself")
        self.continues &= getattr(layer, "continues", True)
        self.states[_unique_index(layer, self.states)] = {
            name: StateShape(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in states.tensors.items()
        }
        return out


def _unique_index(layer: nn.Module, known: Mapping[int, object]) -> int:
    index: int | None = getattr(layer, "layer_idx", None)
    if index is None or index in known:
        raise ValueError(f"{type(layer).__name__} has no unique layer_idx")
    return index


class PagedCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens in every layer.

    Each layer has a tensor (num_blocks * HK, block_size, D) for keys and one for values. The tokens of a block and head are
    contiguous, so that gathering a table's blocks gives (N, HK, L, D).

    route_shape: of the experts that are recorded for each token, if they are. They are stored in the token's block too:
                 (num_blocks + 1, block_size, layers, experts per token). The last block holds what belongs to no sequence.
    states:      slots for the states of `num_slots` sequences, if layers have states.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        route_shape: RouteShape | None = None,
        layer_states: LayerStates | None = None,
        num_slots: int = 0,
    ) -> None:
        self.layers = dict(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.states = StateSlots(layer_states, num_slots, device) if layer_states else None
        self.routes: Tensor | None = None
        if route_shape is not None:
            sizes = (num_blocks + 1, block_size, route_shape.num_layers, route_shape.top_k)
            self.routes = torch.zeros(sizes, dtype=route_shape.dtype, device=device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for index, shape in self.layers.items():
            rows = num_blocks * shape.num_heads
            # zeros, because masked tokens are multiplied by 0, which uninitialized NaN would survive
            self.keys[index] = torch.zeros(rows, block_size, shape.key_dim, dtype=shape.dtype, device=device)
            self.values[index] = torch.zeros(rows, block_size, shape.value_dim, dtype=shape.dtype, device=device)

    def grow(self, num_blocks: int, num_slots: int = 0) -> None:
        """Add empty blocks and state slots until there are this many; existing ones keep their content."""
        if self.states is not None:
            self.states.grow(num_slots)
        for index, shape in self.layers.items():
            for store in (self.keys, self.values):
                store[index] = _with_rows(store[index], num_blocks * shape.num_heads)
        if self.routes is not None:
            self.routes = _with_rows(self.routes, num_blocks + 1)
        self.num_blocks = max(self.num_blocks, num_blocks)

    def addresses(self) -> Tensor:
        """(layers, 2) on the CPU: addresses of each layer's keys and values, by `layer_idx`."""
        table = torch.zeros(max(self.layers, default=-1) + 1, 2, dtype=torch.int64)
        for index in self.layers:
            table[index] = torch.tensor([self.keys[index].data_ptr(), self.values[index].data_ptr()])
        return table

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers: (source, target) pairs."""
        if not copies:
            return
        pairs = to_device(torch.tensor(copies), self.device)  # (N, 2)
        for index, shape in self.layers.items():
            source, target = (blocks_of_heads(pairs[:, i, None], shape.num_heads) for i in (0, 1))
            for store in (movable(self.keys[index]), movable(self.values[index])):
                store[target] = store[source]
        if self.routes is not None:
            self.routes[pairs[:, 1]] = self.routes[pairs[:, 0]]

    def write_routes(self, slots: Tensor, routes: Tensor) -> None:
        """routes: (T, layers, experts per token) of tokens in these cache slots (T,); slot -1 is nowhere."""
        assert self.routes is not None
        self.routes.flatten(0, 1)[slots] = routes

    def read_routes(self, table: Sequence[int], num_tokens: int) -> np.ndarray:
        """(num_tokens, layers, experts per token) of the first tokens of a block table, on the host."""
        assert self.routes is not None
        blocks = to_device(torch.tensor(table[: -(-num_tokens // self.block_size)], dtype=torch.int64), self.device)
        return self.routes[blocks].flatten(0, 1)[:num_tokens].cpu().numpy()


def _with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """The tensor with zeros up to `num_rows`; it may have as many already, from a growth that ran out of memory."""
    missing = num_rows - len(tensor)
    if missing <= 0:
        return tensor
    rows = movable(tensor)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]).view(tensor.dtype)


def movable(tensor: Tensor) -> Tensor:
    """The same memory in a type that torch can index and join: bytes for 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype == fp8.DTYPE else tensor


def as_cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the cache's type."""
    return fp8.saturated(x) if dtype == fp8.DTYPE else x


def blocks_of_heads(table: Tensor, num_heads: int) -> Tensor:
    """Blocks (N, nb) -> flat (N, HK, nb): their rows in a layer's cache tensor."""
    heads = torch.arange(num_heads, device=table.device)
    return (table[:, None] * num_heads + heads[:, None]).flatten()


def rows_of_heads(store: Tensor, blocks: Tensor, num_rows: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """A layer's cache tensor and `blocks_of_heads` -> (N, HK, L, D) in the model's dtype."""
    rows = movable(store).index_select(0, blocks).view(store.dtype).to(dtype)
    return rows.unflatten(0, (num_rows, num_heads, -1)).flatten(2, 3)


def slots_of_heads(slots: Tensor, num_heads: int, block_size: int) -> Tensor:
    """Cache slots (T,) -> flat (T, HK): their rows in a layer's cache tensor viewed as (num_blocks * HK * block_size, D)."""
    heads = torch.arange(num_heads, device=slots.device)
    block, offset = slots[:, None] // block_size, slots[:, None] % block_size
    return ((block * num_heads + heads) * block_size + offset).flatten()


class CachedRows:
    """N rows with Q new tokens each, and their blocks.

    first:     index of the rows' first token in the step; their tokens are contiguous.
    table:     (N, nb) blocks of each row, padded on the right with any block.
    positions: (N, Q) position of each new token in its sequence.
    """

    def __init__(self, first: int, table: Tensor, positions: Tensor) -> None:
        self.first = first
        self.table = table
        self.positions = positions
        self.num_tokens = positions.numel()
        self._gather_rows: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, tuple[int | None, int | None]], Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, num_heads: int, options: LayerOptions) -> Tensor:
        """query (H, T, D) of the whole step; keys and values of the layer's cache -> (N * Q, H, D)."""
        num_rows, length_q = self.positions.shape
        groups = query.shape[0] // num_heads
        if num_heads not in self._gather_rows:
            self._gather_rows[num_heads] = blocks_of_heads(self.table, num_heads)
        gathered = self._gather_rows[num_heads]
        k, v = (rows_of_heads(t, gathered, num_rows, num_heads, query.dtype) for t in (keys, values))
        unpicked = None
        if options.index is not None:
            index = options.index.tokens(slice(self.first, self.first + self.num_tokens)).rows(num_rows)
            k, scored = index.split_keys(k, query.shape[-1])
            unpicked = index.hide_others(scored, self._hidden(k.shape[2], options))
        q = query[:, self.first : self.first + self.num_tokens].transpose(0, 1).unflatten(0, (num_rows, length_q))
        if v.shape[-1] == 0:  # latents
            v = k
        if is_exact():
            out = exact_attention(q.transpose(1, 2), k, v, self.positions, options).transpose(1, 2)
        elif options.softcap is None and options.sinks is None:
            if v is k and length_q > 1:  # a view for each head: G times the queries would need G times the mask
                k = v = k.expand(-1, groups, -1, -1)
                num_heads, groups = groups, 1
            most = max(1, MAX_MASK // (num_rows * groups * k.shape[2]))
            outputs = []
            for start in range(0, length_q, most):
                part = slice(start, min(start + most, length_q))
                # the G query heads of a key head become G more queries, so that keys are not repeated
                part_q = q[:, part].unflatten(2, (num_heads, groups)).transpose(1, 2).flatten(2, 3)  # (N, HK, Q * G, D)
                mask = self._mask(part, k.shape[2], groups, options, query.dtype, unpicked)
                part_out = F.scaled_dot_product_attention(part_q, k, v, mask, scale=options.scaling)
                outputs.append(part_out.unflatten(2, (-1, groups)).transpose(1, 2))  # (N, Q, HK, G, D)
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        else:
            out = eager_attention(q.transpose(1, 2), k, v, self.positions, options, unpicked).transpose(1, 2)
        return out.reshape(self.num_tokens, num_heads * groups, -1)

    def _mask(
        self,
        part: slice,
        length: int,
        groups: int,
        options: LayerOptions,
        dtype: torch.dtype,
        unpicked: Tensor | None,
    ) -> Tensor:
        """(N, 1, Q * G, L) of some queries: 0 if the query sees the token, else -inf. That of all is kept for other layers."""
        if unpicked is not None:
            return additive_mask(unpicked[:, part].repeat_interleave(groups, 1), dtype)[:, None]
        which = (groups, options.extent)
        if which in self._masks:
            return self._masks[which]
        hidden = self._hidden(length, options, part).repeat_interleave(groups, 1)
        mask = additive_mask(hidden, dtype)[:, None]
        if part == slice(0, self.positions.shape[1]):
            self._masks[which] = mask
        return mask

    def _hidden(self, length: int, options: LayerOptions, part: slice = slice(None)) -> Tensor:
        """(N, Q, L): whether the query may not see the token."""
        keys = torch.arange(length, device=self.table.device)
        hidden: Tensor = options.hides(self.positions[:, part, None], keys)
        return hidden


class PagedAttention:
    """The attention context of one step of prefill, or of prefill and decoding.

    slots:         (T,) cache slot of each token: block * block_size + offset.
    cached:        rows with tokens in the cache; theirs are the first tokens of the step.
    fresh_lengths: number of tokens of each sequence that starts in this step.
    states:        the rows of layers with a state; None if there are no such layers.
    """

    def __init__(
        self,
        cache: PagedCache,
        slots: Tensor,
        cached: Sequence[CachedRows],
        fresh_lengths: Sequence[int],
        states: PrefillStates | None = None,
    ) -> None:
        self.cache = cache
        self.cached = cached
        self.num_cached = sum(rows.num_tokens for rows in cached)
        self.fresh = PackedAttention(fresh_lengths, slots.device) if fresh_lengths else None
        self.slots = slots
        self.states = states
        self._head_slots: dict[int, Tensor] = {}

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        outputs = self._attend_cached(layer, query, key, value, options)
        if self.fresh is not None:
            q, k, v = (t[:, :, self.num_cached :] for t in (query, key, value))
            outputs.append(self.fresh.attend(layer, q, k, v, self._of_fresh(options))[0])
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def attend_latent(self, layer: nn.Module, query: Tensor, keys: LatentKeys, options: LayerOptions) -> Tensor:
        absorbed = keys.absorb(query[:, :, : self.num_cached])
        outputs = self._attend_cached(layer, absorbed, *keys.join(options.index), options)
        outputs = [keys.project(torch.cat(outputs)[None])[0]] if outputs else []
        if self.fresh is not None:
            k, v = keys.from_token(self.num_cached).expand()
            options = self._of_fresh(options)
            if options.index is not None:
                k = options.index.join_keys(k)
            outputs.append(self.fresh.attend(layer, query[:, :, self.num_cached :], k, v, options)[0])
        return torch.cat(outputs)[None]

    def _attend_cached(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions
    ) -> list[Tensor]:
        """Write the keys and values of all tokens to the cache -> outputs (N * Q, H, D) of the cached rows."""
        index: int = layer.layer_idx  # type: ignore[assignment]
        keys, values = self.cache.keys[index], self.cache.values[index]
        self._write(keys, key)
        self._write(values, value)
        return [rows.attend(query[0], keys, values, key.shape[1], options) for rows in self.cached]

    def _of_fresh(self, options: LayerOptions) -> LayerOptions:
        if options.index is None:
            return options
        return replace(options, index=options.index.tokens(slice(self.num_cached, None)))

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        assert self.states is not None
        return self.states.mix(layer.layer_idx, core, x)  # type: ignore[arg-type]

    def _write(self, store: Tensor, new: Tensor) -> None:
        """Write the new keys or values (1, HK, T, D) to their cache slots."""
        if store.is_cuda:
            from lockstep.kernels.paged_decode import write_to_cache

            write_to_cache(new, store, self.slots, self.cache.block_size, fp8=store.dtype == fp8.DTYPE)
            return
        num_heads = new.shape[1]
        if num_heads not in self._head_slots:
            self._head_slots[num_heads] = slots_of_heads(self.slots, num_heads, self.cache.block_size)
        tokens = as_cached(new[0].transpose(0, 1).flatten(0, 1), store.dtype)
        movable(store).flatten(0, 1).index_copy_(0, self._head_slots[num_heads], movable(tokens))
