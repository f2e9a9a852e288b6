"""Indexed attention (DeepSeek-V3.2): a small scorer picks the keys that a query attends to, among those that it may see.

    score of a key = Σ_h weight_h * relu(query_h · key)      the `topk` best keys are attended to, all others are hidden

The scorer's keys travel with the keys of attention, a part on each head, so that whatever lays out or caches keys takes them along.
Legend: B rows of T tokens; N rows of Q queries and K keys; HI heads of the scorer of size DI; HK key heads of size D.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class KeyIndex:
    """The scorer's side of some queries.

    queries: (B, T, HI, DI) of the scorer; its keys are part of attention's keys, see `join_keys`.
    weights: (B, T, HI), the scale of query · key included.
    topk:    number of keys that a query attends to.
    keys:    (B, T, DI) until they are joined.
    """

    queries: Tensor
    weights: Tensor
    topk: int
    keys: Tensor | None = None

    def join_keys(self, key: Tensor) -> Tensor:
        """(B, HK, T, D) -> (B, HK, T, D + E): the scorer's keys are cut into HK parts of E."""
        assert self.keys is not None
        num_heads = key.shape[1]
        width = -(-self.keys.shape[-1] // num_heads)
        padded = F.pad(self.keys, (0, num_heads * width - self.keys.shape[-1]))
        parts = padded.unflatten(-1, (num_heads, width)).transpose(1, 2)
        return torch.cat([key, parts.to(key.dtype)], -1)

    def split_keys(self, joined: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """(N, HK, K, D + E) -> keys (N, HK, K, D) and those of the scorer (N, K, DI)."""
        parts = joined[..., dim:].transpose(1, 2).flatten(2)
        keys = joined[..., :dim]
        if keys.is_cuda:  # whose attention kernels refuse rows that are not aligned
            keys = keys.contiguous()
        return keys, parts[..., : self.queries.shape[-1]]

    def tokens(self, which: Any) -> "KeyIndex":
        """Of some of the B * T tokens: a slice or an index."""
        queries, weights = (t.flatten(0, 1)[which][None] for t in (self.queries, self.weights))
        keys = None if self.keys is None else self.keys.flatten(0, 1)[which][None]
        return replace(self, queries=queries, weights=weights, keys=keys)

    def rows(self, num_rows: int) -> "KeyIndex":
        """(1, N * Q, …) -> (N, Q, …)."""
        queries, weights = (t[0].unflatten(0, (num_rows, -1)) for t in (self.queries, self.weights))
        return replace(self, queries=queries, weights=weights)

    def split(self, shapes: Sequence[tuple[int, ...]]) -> "list[KeyIndex]":
        """(1, sum of N * Q, …) -> (N, Q, …) for each shape (N, Q)."""
        sizes = [math.prod(shape) for shape in shapes]
        parts = zip(self.queries.split(sizes, 1), self.weights.split(sizes, 1), shapes)
        return [replace(self, queries=q, weights=w).rows(shape[0]) for q, w, shape in parts]

    @torch.no_grad()
    def hide_others(self, keys: Tensor, hidden: Tensor) -> Tensor:
        """hidden (N or 1, Q, K), the keys that a query may not see -> (N, Q, K) with all that it did not pick.

        keys: (N, K, DI) of the scorer.
        """
        num_rows, num_queries = self.queries.shape[:2]
        scores = torch.zeros(num_rows, num_queries, keys.shape[1], device=keys.device)
        columns = keys.float().transpose(1, 2)
        for head in range(self.queries.shape[2]):  # one at a time: all at once would be HI times the memory
            products = F.relu(self.queries[:, :, head].float() @ columns)
            scores += self.weights[:, :, head, None].float() * products
        scores = scores.masked_fill(hidden, -math.inf)
        picked = scores.topk(min(self.topk, keys.shape[1]), -1).indices
        return hidden | torch.ones_like(scores, dtype=torch.bool).scatter(-1, picked, False)
