"""The attention function under every model here, so that training and decoding run transformers' own modules.

    model(input_ids, position_ids, use_cache=False, lockstep_context=context)
      └─ each attention layer calls `lockstep` attention ─► context.attend(layer, query, key, value, ...)

A context says what the tokens of one forward pass may see: `PackedAttention` (sequences laid end to end, for training) is here,
the paged cache of the embedded rollout is in `models/paged_attention.py`. It travels as a keyword argument, which gradient
checkpointing keeps for its recomputation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from lockstep.models.short_attention import ShortRows, short_attention
from lockstep.utils.device import to_device

ATTENTION_NAME = "lockstep"

VARLEN_WIDTHS = range(8, 257, 8)
"""Dimensions of a head that the variable-length kernel takes."""
SHORT = 2
"""Rows are short with at most so many keys for each dimension of a head: their probabilities are no larger than so many queries."""


@dataclass(frozen=True)
class LayerOptions:
    """How one layer attends.

    scaling:        factor of query · key.
    sliding_window: how many tokens back a query sees, itself included; None for all.
    softcap:        bound of the attention logits; None for none.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionContext(Protocol):
    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        """query (1, H, T, D), key and value (1, HK, T, D) of one layer (`layer.layer_idx`) -> output (1, T, H, D)."""


def lockstep_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    lockstep_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if lockstep_context is None:
        raise RuntimeError(
            f"{type(module).__name__} got no attention context: the model does not hand keyword arguments down to its "
            "attention layers, or was called outside the engines. Use actor_rollout_ref.rollout.name=hf for such a model."
        )
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} attends with sinks, which is not supported")
    how = LayerOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return lockstep_context.attend(module, query, key, value, how), None


AttentionInterface.register(ATTENTION_NAME, lockstep_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


def no_mask(device: torch.device) -> Tensor:
    """A mask that our attention ignores: transformers hands four dimensions on as they are, but for None looks at the positions."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class PackedAttention:
    """Causal attention over sequences that lie end to end in one row of T tokens.

    lengths:  tokens of each sequence in order; they sum to T.
    prefixes: for each sequence, (start, length) of tokens elsewhere in the row that come before its own: the prompt that it
              shares with another one. None where every sequence is whole.

    In half precision on CUDA one variable-length kernel serves all of them. Elsewhere sequences of similar length are padded to
    rows: to the right, so that the causal mask alone keeps padding out. Short ones go through `short_attention`.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device, prefixes: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self.lengths = list(lengths)
        self.prefixes = None if prefixes is None else list(prefixes)
        self._starts = [0, *accumulate(self.lengths)]
        self._device = device
        self._short_rows: dict[int, ShortRows] = {}

    @cached_property
    def max_key_length(self) -> int:
        if self.prefixes is None:
            return max(self.lengths)
        return max(own + before for own, (_, before) in zip(self.lengths, self.prefixes))

    @cached_property
    def _varlen_bounds(self) -> "_VarlenBounds":
        return _VarlenBounds(self.lengths, self._starts, self.prefixes, self._device)

    @cached_property
    def buckets(self) -> "list[_Rows]":
        """Sequences of similar length: the whole ones, then those with a prefix."""
        start, length = np.array([self._starts[:-1], self.lengths])
        prefix, before = np.array(self.prefixes or [(0, 0)] * len(length)).T
        parts = (np.flatnonzero(before == 0), np.flatnonzero(before))
        buckets = [part[places] for part in parts for places in _length_buckets((length + before)[part])]
        return [_Rows(*(column[which, None] for column in (start, length, prefix, before))) for which in buckets]

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        refuse_softcap(how.softcap)
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (T, H, D)
        window = self.window_of(how)
        width, where, dtype = query.shape[-1], query.device.type, query.dtype
        one_width = width == value.shape[-1]
        if where == "cpu" and dtype == torch.float32 and one_width and self.has_short_rows(width):
            attend = self._short
        elif where == "cuda" and dtype in (torch.bfloat16, torch.float16) and one_width and width in VARLEN_WIDTHS:
            attend = self._varlen
        else:
            attend = self._bucketed
        return attend(q, k, v, how.scaling, window)[None]

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        bounds = self._varlen_bounds
        if bounds.key_rows is not None:
            from lockstep.kernels.layer_gradients import take_rows

            k, v = take_rows(k, bounds.key_rows), take_rows(v, bounds.key_rows)
        # What torch.nn.attention.varlen calls: its Python, forward and backward, takes the host longer than the kernel the device.
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            bounds.queries,
            bounds.keys,
            max(self.lengths),
            self.max_key_length,
            0.0,
            window is None,
            False,
            scale=scaling,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )[0]
        return out

    def _short(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        return short_attention(q, k, v, *self.short_plan(window, k.shape[1], q.shape[1]), scaling)

    def short_plan(self, window: int | None, num_key_heads: int, num_heads: int) -> tuple[ShortRows, list[Tensor]]:
        """The rows and masks that `short_attention` takes."""
        if num_key_heads not in self._short_rows:
            self._short_rows[num_key_heads] = _short_rows(self.buckets, self._starts[-1], num_key_heads)
        masks = [rows.mask_of_heads(window, num_key_heads, num_heads // num_key_heads) for rows in self.buckets]
        return self._short_rows[num_key_heads], masks

    def has_short_rows(self, head_dim: int) -> bool:
        return self.max_key_length <= SHORT * head_dim

    def window_of(self, how: LayerOptions) -> int | None:
        """How many tokens back a layer sees; None where that is everything."""
        reaches_all = how.sliding_window is None or how.sliding_window >= self.max_key_length
        return None if reaches_all else how.sliding_window

    def _bucketed(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        rows_q = self._rows_of(q, self._query_places, [rows.queries.shape for rows in self.buckets])
        rows_k, rows_v = (
            self._rows_of(t, self._key_places, [rows.keys.shape for rows in self.buckets]) for t in (k, v)
        )
        parts = []
        for rows, of_q, of_k, of_v in zip(self.buckets, rows_q, rows_k, rows_v):
            mask = rows.mask(window, q)
            o = F.scaled_dot_product_attention(
                of_q,
                of_k,
                of_v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(o.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, self._places)

    @staticmethod
    def _rows_of(tokens: Tensor, places: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """tokens (T, H, D) at the places of all buckets -> for each bucket's (N, L) of them (N, H, L, D).

        All are taken at once, so that their gradient is summed once.
        """
        taken = tokens.index_select(0, places).split([math.prod(shape) for shape in shapes])
        return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(taken, shapes)]

    @cached_property
    def _query_places(self) -> Tensor:
        """Token index of each query of all buckets."""
        return self._on_device(np.concatenate([rows.queries.ravel() for rows in self.buckets]))

    @cached_property
    def _key_places(self) -> Tensor:
        """Token index of each key of all buckets."""
        return self._on_device(np.concatenate([rows.keys.ravel() for rows in self.buckets]))

    @cached_property
    def _places(self) -> Tensor:
        """(T) where each token is among the queries of all buckets."""
        places = np.empty(self._starts[-1], dtype=np.int64)
        start = 0
        for rows in self.buckets:
            valid = np.flatnonzero(rows.valid)
            places[rows.queries.ravel()[valid]] = start + valid
            start += rows.valid.size
        return self._on_device(places)

    def _on_device(self, places: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(places), self._device)


class PaddedAttention:
    """Causal attention over B padded rows, for models that cannot compute on packed tokens.

    attention_mask: (B, L), 1 where a place holds a token.
    """

    def __init__(self, attention_mask: Tensor) -> None:
        self.attention_mask = attention_mask.bool()

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        refuse_softcap(how.softcap)
        length = query.shape[2]
        causal = sliding_mask(length, how.sliding_window, query.device)
        mask = causal[None, None] & self.attention_mask[:, None, None, :]
        mask = mask | torch.eye(
            length, dtype=torch.bool, device=query.device
        )  # a padding place sees itself: no empty softmax
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=how.scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)


class Witness:
    """A context that keeps how layers attend, and with what: query, key and value of each."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        self.hows: list[LayerOptions] = []
        self.seen: list[Tensor] = []

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        self.hows.append(how)
        self.seen += [query.clone(), key.clone(), value.clone()]
        return self._context.attend(layer, query, key, value, how)


def refuse_softcap(softcap: float | None) -> None:
    if softcap is not None:
        raise ValueError(
            "attention with logit soft-capping is not supported; train a model without attn_logit_softcapping"
        )


def sliding_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """(L, L) bool: query i sees key j where 0 <= i - j < window."""
    i = torch.arange(length, device=device)
    gap = i[:, None] - i[None, :]
    return (gap >= 0) if window is None else (gap >= 0) & (gap < window)


class _VarlenBounds:
    """Where sequences begin and end, for a variable-length kernel.

    queries, keys: (N + 1,) bounds among the T tokens and among the keys.
    key_rows:      place in the row of each key; None where keys are the tokens as they lie.
    """

    def __init__(
        self, lengths: list[int], starts: list[int], prefixes: list[tuple[int, int]] | None, device: torch.device
    ) -> None:
        from lockstep.kernels.layer_gradients import RowIndex

        self.queries = to_device(torch.tensor(starts, dtype=torch.int32), device)
        self.keys: Tensor = self.queries
        self.key_rows: RowIndex | None = None
        if prefixes is not None:
            key_lengths = [own + before for own, (_, before) in zip(lengths, prefixes)]
            self.keys = to_device(torch.tensor([0, *accumulate(key_lengths)], dtype=torch.int32), device)
            places = [
                torch.arange(place, place + length)
                for start, own, prefix in zip(starts, lengths, prefixes)
                for place, length in (prefix, (start, own))
            ]
            self.key_rows = RowIndex(to_device(torch.cat(places), device), starts[-1])


class _Rows:
    """Some sequences of a pack as padded rows; on the host, where small arrays cost least.

    start, length:  (N, 1) where a sequence's own tokens are in the packed row.
    prefix, before: (N, 1) where and how many those are that come before them.
    queries: (N, L) token index of each place; valid: (N, L), False where a place is padding (and repeats the last token).
    keys:    (N, K) token index of each key; own: (N, K), those of the row's own tokens; shared: those of another row's.
    """

    def __init__(self, start: np.ndarray, length: np.ndarray, prefix: np.ndarray, before: np.ndarray) -> None:
        self._before = before
        place = np.arange(length.max())
        self.valid = place < length
        self.queries = start + np.minimum(place, length - 1)
        self._masks: dict[int | None, Tensor | None] = {}
        self._masks_of_heads: dict[tuple[int | None, int, int], Tensor] = {}
        self.keys, self.own, self.shared = self.queries, self.valid, np.zeros_like(self.valid)
        self._continued = bool(before.any())
        if self._continued:
            key = np.arange((before + length).max())
            own = start + np.minimum(key - before, length - 1)
            self.shared = key < before
            self.own = ~self.shared & (key < before + length)
            self.keys = np.where(self.shared, prefix + key, own)

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """What is added to the scores of each query: 0 where it sees a key; None where it sees all that comes before it.

        A mask of booleans would be made into such a one in every layer. like: has the mask's type and device.
        """
        if window not in self._masks:
            wanted = self._continued or window is not None
            mask = torch.from_numpy(_added(self._positions(), self.keys.shape[1], window)[:, None]) if wanted else None
            self._masks[window] = None if mask is None else to_device(mask.to(like.dtype), like.device)
        return self._masks[window]

    def mask_of_heads(self, window: int | None, num_heads: int, groups: int) -> Tensor:
        """The same in float32 for G queries in place of one: (N * HK or 1, L * G, K)."""
        key = window, num_heads, groups
        if key not in self._masks_of_heads:
            num_keys = self.keys.shape[1]
            positions = self._positions().repeat(groups, 1)
            positions = positions.repeat(num_heads if len(positions) > 1 else 1, 0)
            at_each = _added(np.arange(num_keys), num_keys, window)  # to take from: few keys make a small table
            self._masks_of_heads[key] = torch.from_numpy(at_each[positions])
        return self._masks_of_heads[key]

    def _positions(self) -> np.ndarray:
        """(N, L) of the queries among the keys or, where all rows see alike, (1, L)."""
        alike = bool((self._before == self._before[0]).all())
        positions = (self._before[:1] if alike else self._before) + np.arange(self.queries.shape[1])
        last = self.keys.shape[1] - 1  # padding too sees a key: a softmax of nothing is not a number
        return np.minimum(positions, last)


def _added(positions: np.ndarray, num_keys: int, window: int | None) -> np.ndarray:
    """(..., K) what is added to the scores of queries at these positions among their keys."""
    gap = positions[..., None].astype(np.int32) - np.arange(num_keys, dtype=np.int32)
    seen = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def _short_rows(buckets: "list[_Rows]", num_tokens: int, num_heads: int) -> ShortRows:
    def index(parts: Iterator[np.ndarray]) -> np.ndarray:
        """Places of tokens (N, L) -> those of (token, key head), all buckets in one."""
        heads = np.arange(num_heads)[:, None]
        return np.concatenate([(part[:, None] * num_heads + heads).ravel() for part in parts])

    def found(parts: Iterator[np.ndarray]) -> np.ndarray:
        """Marks (N, L) -> where the marked ones are for all key heads, all buckets in one."""
        return np.flatnonzero(np.concatenate([part.repeat(num_heads, 0).ravel() for part in parts]))

    queries, keys = index(rows.queries for rows in buckets), index(rows.keys for rows in buckets)
    valid, own = found(rows.valid for rows in buckets), found(rows.own for rows in buckets)
    shared, padding = found(rows.shared for rows in buckets), found(~rows.valid for rows in buckets)
    places, own_places = np.empty((2, num_tokens * num_heads), dtype=np.int64)
    places[queries[valid]] = valid
    own_places[keys[own]] = own
    arrays = (queries, padding, places, keys, own_places, shared, keys[shared])
    shapes = [(len(rows.queries) * num_heads, rows.queries.shape[1], rows.keys.shape[1]) for rows in buckets]
    return ShortRows(shapes, *map(torch.from_numpy, arrays))


def _length_buckets(num_keys: np.ndarray) -> Iterator[np.ndarray]:
    """Places of the sequences sorted by their keys and cut where the longest of a bucket would be twice the shortest."""
    order = num_keys.argsort(kind="stable")
    start = 0
    for place, length in enumerate(num_keys[order].tolist()):
        if place == start:
            most = 2 * max(length, 8)
        elif length > most:
            yield order[start:place]
            start, most = place, 2 * max(length, 8)
    if len(order):
        yield order[start:]
