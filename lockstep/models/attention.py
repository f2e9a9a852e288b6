"""Attention of training and decoding: what each token may see is up to a context.

    model(input_ids, position_ids, attention_mask=no_mask(device), use_cache=False, lockstep_context=context)
      ├─ our decoder layers ─────────────────────────────────────────► context.attend(layer, query, key, value, options)
      └─ transformers' attention layers call `lockstep_attention` ──►

A context knows which keys each query sees. `PackedAttention` and `PaddedAttention` serve training; the contexts of the KV cache
are in `engines/rollout/embedded/`. The context is a keyword argument, which gradient checkpointing keeps for its recomputation.
Legend: T packed tokens, N rows of Q queries and K keys, H query heads, HK key heads, G = H / HK, D head dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from lockstep.kernels.exact import is_exact
from lockstep.kernels.ops import RowIndex, take_rows
from lockstep.models.exact_attention import exact_attention, with_usual_gradients
from lockstep.models.key_index import KeyIndex
from lockstep.models.latent_attention import LatentKeys
from lockstep.models.layer_options import LayerOptions
from lockstep.models.state_rows import PackedRows, StateCore, length_buckets
from lockstep.utils.device import to_device

ATTENTION_NAME = "lockstep"
FLASH_HEAD_DIMS = range(8, 257, 8)
"""Head dimensions of the variable-length flash kernel."""
MAX_SCORES = 1 << 27
"""Most scores that `eager_attention` holds at a time."""
SERVED = {"sliding_window", "softcap", "s_aux", "is_causal"}
HARMLESS = {"position_ids", "cache_position", "use_cache", "output_router_logits", "num_items_in_batch"}
"""Keyword arguments that models of transformers pass to attention. Any other must be None or False."""


class AttentionContext(Protocol):
    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """query (1, H, T, D), key and value (1, HK, T, D) of one layer (`layer.layer_idx`) -> output (1, T, H, D)."""

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        """x (1, T, C) of one layer with a state (`layer.layer_idx`) -> output of `core` (1, T, C').

        layer.continues: False if `core` computes only whole rows at a time, and single tokens from a state on.
        """


@runtime_checkable
class LatentContext(Protocol):
    """An attention context that keeps latents (MLA); all others are given expanded keys and values."""

    def attend_latent(self, layer: nn.Module, query: Tensor, keys: LatentKeys, options: LayerOptions) -> Tensor:
        """query (1, H, T, D) of one layer (`layer.layer_idx`) -> output (1, T, H, DV)."""


def lockstep_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | LatentKeys,
    value: Tensor | None,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    lockstep_context: AttentionContext | None = None,
    query_scale: Tensor | None = None,
    indices: KeyIndex | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dropout is ignored: it would change the log-probs.

    query_scale: (B, T) factor of each query. indices: what `models/attention_variants.py` lets an indexer return.
    key:         what it lets `expand_kv` return, if the layer has latents; there is no value then.
    """
    if lockstep_context is None:
        raise RuntimeError(
            f"{type(module).__name__} got no attention context: the model does not hand keyword arguments down to its "
            "attention layers, or was called outside the engines. Use actor_rollout_ref.rollout.name=hf for such a model."
        )
    _refuse_unserved(module, attention_mask, kwargs)
    if query_scale is not None:
        query = (query * query_scale[:, None, :, None]).to(query.dtype)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, chunk = (kwargs["sliding_window"], None) if "sliding_window" in kwargs else _extent_in_config(module)
    options = LayerOptions(scaling, window, kwargs.get("softcap"), kwargs.get("s_aux"), chunk, indices)
    if isinstance(key, LatentKeys):
        if isinstance(lockstep_context, LatentContext):
            return lockstep_context.attend_latent(module, query, key, options), None
        key, value = key.expand()
    assert value is not None
    if indices is not None:
        key = indices.join_keys(key)
    return lockstep_context.attend(module, query, key, value, options), None


def require_context(layer: nn.Module, context: AttentionContext | None, config: Any) -> None:
    """RuntimeError if a layer with a state got no context though the model is to compute with one."""
    if context is None and config._attn_implementation == ATTENTION_NAME:
        raise RuntimeError(
            f"{type(layer).__name__} got no attention context: its state would run from one packed row into the next. The model "
            "does not hand keyword arguments down to its layers, or was called outside the engines."
        )


AttentionInterface.register(ATTENTION_NAME, lockstep_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


def no_mask(device: torch.device) -> Tensor:
    """A placeholder that transformers passes through: it builds no mask if it is given one of four dimensions."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _refuse_unserved(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise if the layer asks for something that changes the result and that no context computes."""
    name = type(module).__name__
    if attention_mask is not None and attention_mask.shape != (1, 1, 1, 1):
        shape = tuple(attention_mask.shape)
        raise ValueError(f"{name} builds its own attention mask {shape}, which packed computation would drop")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"{name} is not causal (is_causal=False); only causal attention is supported")
    for key, value in kwargs.items():
        if key not in SERVED | HARMLESS and value is not None and value is not False:
            raise ValueError(f"{name} passes {key} to its attention function, which is not supported")


def _extent_in_config(module: Any) -> tuple[int | None, int | None]:
    """Sliding window and chunk of a layer that passes none: its model applies them in its mask, which `no_mask` replaces."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[module.layer_idx] if layer_types else "sliding_attention"
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return window, chunk


class PackedAttention:
    """Causal attention over sequences that are concatenated to one row of T tokens.

    lengths:  number of tokens of each sequence; they sum to T.
    prefixes: (start, length) per sequence: tokens elsewhere in the row that precede its own, i.e. a prompt that it shares with
              another sequence. None if no sequence has one.

    In half precision on CUDA the variable-length flash kernel serves all sequences at once. Otherwise sequences of similar length
    are padded to rows, on the right, so that the causal mask alone hides the padding.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device, prefixes: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self.lengths = list(lengths)
        self.prefixes = None if prefixes is None else list(prefixes)
        self._starts = [0, *accumulate(self.lengths)]
        self._device = device

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # (T, H, D)
        window, chunk, index = options.sliding_window, options.chunk, options.index
        if window is not None and window >= self.max_key_length:
            options = replace(options, sliding_window=None)
        if chunk is not None and chunk >= self.max_key_length:
            options = replace(options, chunk=None)
        if index is not None and index.topk >= self.max_key_length:
            options = replace(options, index=None)
            k = k[..., : q.shape[-1]]
        half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        fits = query.shape[-1] == value.shape[-1] and query.shape[-1] in FLASH_HEAD_DIMS
        plain = options.softcap is None and options.chunk is None and options.index is None
        attend = self._flash if half and fits and plain else self._bucketed
        if is_exact():
            return with_usual_gradients(self._bucketed, attend, q, k, v, options)[None]
        return attend(q, k, v, options)[None]

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        rows = self._state_rows if getattr(layer, "continues", True) else self._whole_rows
        return rows.run(core, x)

    @cached_property
    def _state_rows(self) -> PackedRows:
        return PackedRows(self.lengths, self._device, self.prefixes)

    @cached_property
    def _whole_rows(self) -> PackedRows:
        return PackedRows(self.lengths, self._device, self.prefixes, continues=False)

    @cached_property
    def max_key_length(self) -> int:
        if self.prefixes is None:
            return max(self.lengths)
        return max(own + before for own, (_, before) in zip(self.lengths, self.prefixes))

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, options: LayerOptions) -> Tensor:
        query_bounds, key_bounds, key_rows = self._flash_bounds
        if key_rows is not None:
            k, v = take_rows(k, key_rows), take_rows(v, key_rows)
        left, right = (None, None) if options.sliding_window is None else (options.sliding_window - 1, 0)
        lengths = (query_bounds, key_bounds, max(self.lengths), self.max_key_length, 0.0, left is None)
        settings = {"scale": options.scaling, "window_size_left": left, "window_size_right": right}
        if options.sinks is not None:
            return FlashWithSinks.apply(q, k, v, options.sinks, lengths, settings)
        # the op itself: the Python of torch.nn.attention.varlen takes longer on the host than the kernel on the device
        return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, False, **settings)[0]

    @cached_property
    def _flash_bounds(self) -> tuple[Tensor, Tensor, RowIndex | None]:
        """(N + 1,) bounds of the sequences' queries and of their keys; the token index of each key, None if it is the same."""
        query_bounds = self._on_device(np.array(self._starts, dtype=np.int32))
        if self.prefixes is None:
            return query_bounds, query_bounds, None
        key_lengths = [own + before for own, (_, before) in zip(self.lengths, self.prefixes)]
        own_tokens = zip(self._starts, self.lengths)
        parts = [np.arange(first, first + n) for pair in zip(self.prefixes, own_tokens) for first, n in pair]
        key_bounds = self._on_device(np.array([0, *accumulate(key_lengths)], dtype=np.int32))
        return query_bounds, key_bounds, RowIndex(self._on_device(np.concatenate(parts)), self._starts[-1])

    def _bucketed(self, q: Tensor, k: Tensor, v: Tensor, options: LayerOptions) -> Tensor:
        query_index, key_index, token_index = self._bucket_index
        shapes = [rows.queries.shape for rows in self.buckets]
        rows_q = _split_rows(q.index_select(0, query_index), shapes)
        rows_k, rows_v = (
            _split_rows(t.index_select(0, key_index), [rows.keys.shape for rows in self.buckets]) for t in (k, v)
        )
        indices: list[KeyIndex] | None = None
        if options.index is not None:
            indices = options.index.tokens(query_index).split(shapes)
        outputs = []
        for place, (rows, of_q, of_k, of_v) in enumerate(zip(self.buckets, rows_q, rows_k, rows_v)):
            unpicked = None
            if indices is not None:
                of_k, scored = indices[place].split_keys(of_k, q.shape[-1])
                unpicked = indices[place].hide_others(scored, rows.hidden(options, q.device))
            if is_exact():
                out = exact_attention(of_q, of_k, of_v, self._positions[place], options)
            else:
                out = self._attend_rows(place, unpicked, of_q, of_k, of_v, options)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, token_index)

    def _attend_rows(
        self, place: int, unpicked: Tensor | None, q: Tensor, k: Tensor, v: Tensor, options: LayerOptions
    ) -> Tensor:
        """q (N, H, Q, D), k and v (N, HK, K, D) of a bucket -> (N, H, Q, D)."""
        if options.softcap is not None or options.sinks is not None:
            return eager_attention(q, k, v, self._positions[place], options, unpicked)
        mask = self.buckets[place].mask(options, q) if unpicked is None else additive_mask(unpicked, q.dtype)[:, None]
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=options.scaling, enable_gqa=gqa
        )

    @cached_property
    def buckets(self) -> "list[_Rows]":
        """Sequences of similar length: first those without a prefix, then those with one."""
        start, length = np.array([self._starts[:-1], self.lengths])
        prefix, before = np.array(self.prefixes or [(0, 0)] * len(length)).T
        parts = (np.flatnonzero(before == 0), np.flatnonzero(before))
        buckets = [part[places] for part in parts for places in length_buckets((length + before)[part])]
        return [_Rows(*(column[which, None] for column in (start, length, prefix, before))) for which in buckets]

    @cached_property
    def _bucket_index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token index of each query and of each key of all buckets; (T,) index of each token among these queries."""
        queries = np.concatenate([rows.queries.ravel() for rows in self.buckets])
        keys = np.concatenate([rows.keys.ravel() for rows in self.buckets])
        valid = np.flatnonzero(np.concatenate([rows.valid.ravel() for rows in self.buckets]))
        tokens = np.empty(self._starts[-1], dtype=np.int64)
        tokens[queries[valid]] = valid
        return self._on_device(queries), self._on_device(keys), self._on_device(tokens)

    @cached_property
    def _positions(self) -> list[Tensor]:
        return [self._on_device(rows.positions) for rows in self.buckets]

    def _on_device(self, index: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(index), self._device)


class PaddedAttention:
    """Causal attention over B padded rows (`use_remove_padding=false`).

    attention_mask: (B, L), 1 at tokens and 0 at padding. Padding is neither seen nor computed: its output is 0.
    """

    def __init__(self, attention_mask: Tensor) -> None:
        self._tokens = attention_mask.flatten().nonzero()[:, 0]
        self._size = attention_mask.numel()
        lengths = [length for length in attention_mask.bool().sum(-1).tolist() if length]
        self._packed = PackedAttention(lengths, attention_mask.device)

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        num_rows = len(query)
        q, k, v = (t.transpose(1, 2).flatten(0, 1)[self._tokens].transpose(0, 1)[None] for t in (query, key, value))
        if options.index is not None:
            options = replace(options, index=options.index.tokens(self._tokens))
        out = self._packed.attend(layer, q, k, v, options)[0]
        return self._pad(out, num_rows)

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        return self._pad(self._packed.mix(layer, core, x.flatten(0, 1)[self._tokens][None])[0], len(x))

    def _pad(self, out: Tensor, num_rows: int) -> Tensor:
        """(T, …) of the tokens -> (B, L, …)."""
        padded = out.new_zeros(self._size, *out.shape[1:]).index_copy(0, self._tokens, out)
        return padded.unflatten(0, (num_rows, -1))


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 if a key is seen, else -inf: scaled_dot_product_attention would convert a bool mask in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, options: LayerOptions, unpicked: Tensor | None = None
) -> Tensor:
    """Attention with softcap and sinks: query (N, H, Q, D), key and value (N, HK, K, D) -> (N, H, Q, D).

    positions: (N or 1, Q) index of each query among its keys; it sees no later ones.
    unpicked:  (N, Q, K) keys that an index hides, if the layer has one.

    The scores are computed in pieces of rows and queries, and again in the backward: at most `MAX_SCORES` exist at a time.
    """
    num_rows, num_heads, length, _ = query.shape
    scores_per_query = num_heads * key.shape[2]
    rows = max(1, MAX_SCORES // (scores_per_query * length))
    queries = max(1, MAX_SCORES // (scores_per_query * rows))
    if unpicked is None:
        unpicked = positions.new_zeros((1, 1, 1), dtype=torch.bool).expand(num_rows, length, 1)
    outputs = []
    per_row = (query, key, value, positions.expand(num_rows, length), unpicked)
    for q, k, v, p, u in zip(*(t.split(rows) for t in per_row)):
        pieces = [
            checkpoint(_eager_piece, *piece, k, v, options, use_reentrant=False, preserve_rng_state=False)
            for piece in zip(q.split(queries, 2), p.split(queries, 1), u.split(queries, 1))
        ]
        outputs.append(torch.cat(pieces, 2))
    return torch.cat(outputs)


def _eager_piece(
    query: Tensor, positions: Tensor, unpicked: Tensor, key: Tensor, value: Tensor, options: LayerOptions
) -> Tensor:
    num_rows, num_heads, length, _ = query.shape
    num_key_heads, num_keys = key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.reshape(num_rows, num_key_heads, -1, query.shape[3])  # (N, HK, G * Q, D): keys are not repeated
    scores = q.to(dtype) @ key.to(dtype).transpose(2, 3) * options.scaling
    scores = scores.view(num_rows, num_heads, length, num_keys)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    hidden = options.hides(positions[:, :, None], torch.arange(num_keys, device=query.device)) | unpicked
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if options.sinks is not None:
        total = torch.logaddexp(total, options.sinks.to(dtype)[:, None, None])
    probs = (scores - total).exp().to(value.dtype)
    return (probs.view(num_rows, num_key_heads, -1, num_keys) @ value).view(num_rows, num_heads, length, -1)


class FlashWithSinks(torch.autograd.Function):
    """The variable-length flash kernel with a sink s per query head, on q, k, v (T, H, D).

    With lse the log-sum-exp of a query's scores z, lse' = log(exp(lse) + exp(s)) makes its probabilities P' = exp(z - lse') and
    its output out' = out * exp(lse - lse'). The kernel's backward computes P' from lse' and D = dout · out' from out', so that
    given these two it returns the gradients of q, k and v; that of s is the sum of -exp(s - lse') * D.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: tuple, settings: dict) -> Tensor:
        out, lse, *random_state, _ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, False, **settings)
        total = torch.logaddexp(lse, sinks.float()[:, None])  # (H, T)
        out = (out * (lse - total).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, *random_state)
        ctx.lengths = lengths
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total, *random_state = ctx.saved_tensors
        grad = grad.contiguous()
        arguments = (grad, q, k, v, out, total, *ctx.lengths, *random_state)
        gradients = torch.ops.aten._flash_attention_backward(*arguments, **ctx.settings)
        sink_probs = (sinks.float()[:, None] - total).exp()  # (H, T)
        of_sinks = -(sink_probs.T * (grad.float() * out.float()).sum(-1)).sum(0)
        return *gradients, of_sinks.to(sinks.dtype), None, None


class _Rows:
    """Some sequences of a pack as N padded rows, as numpy arrays: small ones cost less there than in torch.

    start, length:  (N, 1) first token of each sequence in the pack, and number of tokens.
    prefix, before: (N, 1) the same of the tokens that precede them.
    queries:        (N, Q) token index; padding repeats the last token.
    valid:          (N, Q) False at padding.
    keys:           (N, K) token index; padding repeats the last token.
    positions:      (N, Q) index of each query among its keys, (1, Q) if all rows have the same.
    """

    def __init__(self, start: np.ndarray, length: np.ndarray, prefix: np.ndarray, before: np.ndarray) -> None:
        query = np.arange(length.max())
        self.valid = query < length
        self.queries = self.keys = start + np.minimum(query, length - 1)
        self._has_prefix = bool(before.any())
        if self._has_prefix:
            key = np.arange((before + length).max())
            own = start + np.minimum(key - before, length - 1)
            self.keys = np.where(key < before, prefix + key, own)
        same = bool((before == before[0]).all())
        # padding sees at least one key: the softmax of nothing is NaN
        self.positions = np.minimum((before[:1] if same else before) + query, self.keys.shape[1] - 1)
        self._masks: dict[tuple[int | None, int | None], Tensor | None] = {}
        self._hidden: dict[tuple[int | None, int | None], Tensor] = {}

    def mask(self, options: LayerOptions, like: Tensor) -> Tensor | None:
        """(N or 1, 1, Q, K): 0 if the query may see the key, else -inf; None if `is_causal` says the same.

        like: gives dtype and device.
        """
        if options.extent not in self._masks:
            mask = None
            if self._has_prefix or options.extent != (None, None):
                mask = additive_mask(self._hidden_on_host(options), like.dtype)
                mask = to_device(mask[:, None], like.device)
            self._masks[options.extent] = mask
        return self._masks[options.extent]

    def hidden(self, options: LayerOptions, device: torch.device) -> Tensor:
        """(N or 1, Q, K): whether the query may not see the key."""
        if options.extent not in self._hidden:
            self._hidden[options.extent] = to_device(self._hidden_on_host(options), device)
        return self._hidden[options.extent]

    def _hidden_on_host(self, options: LayerOptions) -> Tensor:
        return torch.from_numpy(options.hides(self.positions[:, :, None], np.arange(self.keys.shape[1])))


def _split_rows(tokens: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """tokens (sum of N * L, H, D) of all buckets -> (N, H, L, D) for each bucket's shape (N, L)."""
    parts = tokens.split([math.prod(shape) for shape in shapes])
    return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, shapes)]
