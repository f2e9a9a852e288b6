"""The attention function under every model here, so that training and decoding run transformers' own modules.

    model(input_ids, position_ids, use_cache=False, lockstep_context=context)
      └─ each attention layer calls `lockstep` attention ─► context.attend(layer, query, key, value, ...)

A context says what the tokens of one forward pass may see: `PackedAttention` (sequences laid end to end, for training) is here,
the paged cache of the embedded rollout is in `models/paged_attention.py`. It travels as a keyword argument, which gradient
checkpointing keeps for its recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "lockstep"


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

    lengths: tokens of each sequence in order; they sum to T.

    In half precision on CUDA one variable-length kernel serves all of them. Elsewhere sequences of similar length are padded to
    rows: to the right, so that the causal mask alone keeps padding out.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.max_length = max(self.lengths)
        self._starts = [0, *accumulate(self.lengths)]
        self._device = device

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor(self._starts, dtype=torch.int32, device=self._device)

    @cached_property
    def buckets(self) -> "list[_Rows]":
        return _length_buckets(self.lengths, self._starts, self._device)

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: LayerOptions) -> Tensor:
        refuse_softcap(how.softcap)
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (T, H, D)
        window = how.sliding_window if how.sliding_window is not None and how.sliding_window < self.max_length else None
        varlen = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        attend = self._varlen if varlen else self._bucketed
        return attend(q, k, v, how.scaling, window)[None]

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        left = -1 if window is None else window - 1
        cu, longest = self.cu_seqlens, self.max_length
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=(left, 0))
        assert isinstance(out, Tensor)  # a pair only where auxiliary outputs are asked for
        return out

    def _bucketed(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        out = v.new_zeros(*q.shape[:2], v.shape[-1])
        for rows in self.buckets:  # rows (N, L): token index of each place, clamped where it is padding
            mask = sliding_mask(rows.index.shape[1], window, q.device) if window is not None else None
            query, key, value = (t[rows.index].transpose(1, 2) for t in (q, k, v))
            o = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            valid = rows.valid
            out = out.index_put((rows.index[valid],), o.transpose(1, 2)[valid])
        return out


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


class _Rows:
    """Some sequences of a pack as padded rows: index (N, L) into the T tokens, valid (N, L)."""

    def __init__(self, starts: list[int], lengths: list[int], device: torch.device) -> None:
        start = torch.tensor(starts, device=device)[:, None]
        length = torch.tensor(lengths, device=device)[:, None]
        place = torch.arange(max(lengths), device=device)[None, :]
        self.valid = place < length
        self.index = start + torch.minimum(place, length - 1)


def _length_buckets(lengths: list[int], starts: list[int], device: torch.device) -> list[_Rows]:
    """Sequences sorted by length and cut where the longest of a bucket would be twice the shortest."""
    buckets: list[_Rows] = []
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    first = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or lengths[order[i]] > 2 * max(lengths[order[first]], 8):
            members = order[first:i]
            buckets.append(_Rows([starts[m] for m in members], [lengths[m] for m in members], device))
            first = i
    return buckets
