"""Attention over rows of few tokens on the CPU, with a gradient from the probabilities kept.

    tokens ─► rows of each bucket ─► scores ─► softmax ─► outputs ─► tokens

A kernel that computes the probabilities anew for the gradient saves memory that rows of tens of tokens do not need, and takes
longer for them than the products themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ShortRows:
    """Sequences as rows, in buckets of rows that are padded to one length; all tensors count (token, key head) as one.

    shapes:   of each bucket, (rows * key heads, queries, keys).
    queries:  which token and head each query is, of all buckets; padding repeats another one.
    padding:  the queries that are padding; they too see a key, as numbers that are not finite would spoil the gradients.
    places:   where each token's query is among them.
    keys:     which token and head each key is, of all buckets.
    own:      where each token's own key is among them.
    shared:   where keys are that are another row's own; shared_by: which token and head these are.
    """

    shapes: Sequence[tuple[int, int, int]]
    queries: Tensor
    padding: Tensor
    places: Tensor
    keys: Tensor
    own: Tensor
    shared: Tensor
    shared_by: Tensor


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: ShortRows, masks: Sequence[Tensor], scaling: float
) -> Tensor:
    """query (T, H, D), key and value (T, HK, D) in float32 -> (T, H, D).

    masks: of each bucket, what is added to the scores; (rows * key heads or 1, queries * G, keys). The G query heads of a key
    head are taken as G queries, so that keys are not repeated.
    """
    out: Tensor = ShortAttention.apply(query, key, value, rows, masks, scaling)
    return out


class ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: ShortRows, masks: Sequence[Tensor], scaling: float
    ) -> Tensor:
        num_key_heads, head_dim = key.shape[1:]
        q = query.reshape(-1, query.shape[1] // num_key_heads * head_dim).index_select(0, rows.queries)
        k, v = (t.reshape(-1, head_dim).index_select(0, rows.keys) for t in (key, value))
        out, probs = attend(q, k, v, rows, masks, scaling)
        ctx.save_for_backward(q, k, v, *probs)
        ctx.rows, ctx.scaling = rows, scaling
        return out.view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *probs = ctx.saved_tensors
        gradient = torch.empty(len(ctx.rows.places), q.shape[1] + 2 * k.shape[1])
        parts = gradient.split((q.shape[1], k.shape[1], k.shape[1]), 1)
        attend_backward(grad.reshape(len(gradient), -1), q, k, v, probs, ctx.rows, ctx.scaling, parts)
        of_q, of_k, of_v = (part.reshape(len(grad), -1, k.shape[1]) for part in parts)
        return of_q, of_k, of_v, None, None, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: ShortRows, masks: Sequence[Tensor], scaling: float
) -> tuple[Tensor, list[Tensor]]:
    """q (queries, G * D), k and v (keys, D) of all rows -> what each (token, key head) gets, (T * HK, G * D); probabilities."""
    head_dim, out = k.shape[1], torch.empty_like(q)
    probs = []
    buckets = zip(_by_query(q, rows, head_dim), _by_key(k, rows), _by_key(v, rows), _by_query(out, rows, head_dim))
    for (of_q, of_k, of_v, of_out), mask in zip(buckets, masks):
        scores = q.new_empty(len(of_q), of_q.shape[1], of_k.shape[1])
        scores.baddbmm_(of_q, of_k.transpose(1, 2), beta=0, alpha=scaling).add_(mask)
        probs.append(scores.softmax(-1))
        torch.bmm(probs[-1], of_v, out=of_out)
    return out.index_select(0, rows.places), probs


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    probs: Sequence[Tensor],
    rows: ShortRows,
    scaling: float,
    gradients: Sequence[Tensor],
) -> None:
    """grad: (T * HK, G * D); gradients: where those of each (token, key head)'s query, key and value go."""
    head_dim = k.shape[1]
    for_out = grad.index_select(0, rows.queries)
    if len(rows.padding):
        for_out.index_fill_(0, rows.padding, 0.0)
    for_q, for_k, for_v = torch.empty_like(q), torch.empty(k.shape), torch.empty(v.shape)
    by_query = zip(*(_by_query(t, rows, head_dim) for t in (q, for_q, for_out)))
    by_key = zip(*(_by_key(t, rows) for t in (k, for_k, v, for_v)))
    for (of_q, to_q, of_out), (of_k, to_k, of_v, to_v), p in zip(by_query, by_key, probs):
        torch.bmm(p.transpose(1, 2), of_out, out=to_v)
        for_p = torch.bmm(of_out, of_v.transpose(1, 2))
        for_scores = torch.ops.aten._softmax_backward_data.out(for_p, p, -1, p.dtype, grad_input=for_p)
        to_q.baddbmm_(for_scores, of_k, beta=0, alpha=scaling)
        to_k.baddbmm_(for_scores.transpose(1, 2), of_q, beta=0, alpha=scaling)
    of_query, *of_key_and_value = gradients
    torch.index_select(for_q, 0, rows.places, out=of_query)
    for of_rows, of_tokens in zip((for_k, for_v), of_key_and_value):  # padding gets 0: no token looks at it
        torch.index_select(of_rows, 0, rows.own, out=of_tokens)
        if len(rows.shared):
            of_tokens.index_add_(0, rows.shared_by, of_rows.index_select(0, rows.shared))


def _by_query(t: Tensor, rows: ShortRows, head_dim: int) -> list[Tensor]:
    """Each bucket's (rows * HK, queries * G, D)"""
    parts = t.split_with_sizes([num_rows * num_queries for num_rows, num_queries, _ in rows.shapes])
    return [part.view(num_rows, -1, head_dim) for part, (num_rows, _, _) in zip(parts, rows.shapes)]


def _by_key(t: Tensor, rows: ShortRows) -> list[Tensor]:
    """Each bucket's (rows * HK, keys, D)"""
    parts = t.split_with_sizes([num_rows * num_keys for num_rows, _, num_keys in rows.shapes])
    return [part.view(num_rows, num_keys, -1) for part, (num_rows, _, num_keys) in zip(parts, rows.shapes)]
