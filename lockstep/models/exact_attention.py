"""Attention whose result for a query does not depend on other queries, or on how keys are stored and padded (`kernels/exact.py`).

    queries in tiles of QUERIES ─► scores with blocks of KEYS keys, counted from the sequence's first ─► exp(score - largest)
                                ─► [ sum of exp(...) * (value, 1) over each block ] added block by block ─► output, total

Both products have one shape, whatever the number of queries and keys. A hidden key has weight 0, and adding 0 changes nothing: so
neither do blocks that a query does not see. The largest score does not depend on the order either.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.kernels.exact import exact_mode
from lockstep.models.layer_options import LayerOptions

QUERIES, KEYS = 16, 64
"""Rows and columns of a block of scores."""
MAX_SCORES = 1 << 27
"""Most scores that exist at a time on the CPU."""

Attention = Callable[[Tensor, Tensor, Tensor, LayerOptions], Tensor]
"""query, key, value, options -> the attended values."""


def with_usual_gradients(
    exact: Attention, usual: Attention, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions
) -> Tensor:
    """What `exact` computes, with the gradients of `usual`."""
    if not torch.is_grad_enabled():
        return exact(query, key, value, options)
    out: Tensor = _WithUsualGradients.apply(query, key, value, options.sinks, options, exact, usual)
    return out


@torch.no_grad()
def depends_on_other_queries(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a query's result depends on the other queries. Libraries do not promise that it does not, so it is tested."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, head_dim, generator=generator).to(device, dtype)
        for heads, length in ((4, 70), (2, 200), (2, 200))
    )
    positions = (torch.arange(70) + torch.tensor([[0], [130]])).to(device)
    options = LayerOptions(head_dim**-0.5)
    expected = exact_attention(query, key, value, positions, options)
    for row, place in ((0, 0), (0, 37), (1, 1), (1, 69)):
        one = slice(place, place + 1)
        length = int(positions[row, place]) + 1
        keys, values = (t[row : row + 1, :, :length] for t in (key, value))
        found = exact_attention(query[row : row + 1, :, one], keys, values, positions[row : row + 1, one], options)
        if not torch.equal(found[0], expected[row, :, one]):
            return True
    return False


class _WithUsualGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        options: LayerOptions,
        exact: Attention,
        usual: Attention,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.options = options
        ctx.usual = usual
        return exact(query, key, value, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad(), exact_mode(False):
            out = ctx.usual(*inputs[:3], replace(ctx.options, sinks=inputs[3]))
        grads = iter(torch.autograd.grad(out, [t for t in inputs if t is not None], grad))
        return *(None if t is None else next(grads) for t in inputs), None, None, None


def exact_attention(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, options: LayerOptions) -> Tensor:
    """query (N, H, Q, D), key and value (N, HK, K, D) -> (N, H, Q, DV), in float32 inside; without gradients.

    positions: (N or 1, Q) index of each query among its keys, of which the first is the first of the sequence.
    """
    assert options.index is None, "exact attention has no key index"
    if query.is_cuda:
        return _on_gpu(query, key, value, positions, options)
    num_rows, num_heads, length, _ = query.shape
    num_key_heads, num_keys = key.shape[1:3]
    most = max(QUERIES, MAX_SCORES // (num_rows * num_heads * num_keys))
    if length > most:  # queries do not depend on each other
        parts = zip(query.split(most, 2), positions.split(most, 1))
        return torch.cat([exact_attention(part, key, value, places, options) for part, places in parts], 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    # the queries of the G heads of a key head, in tiles: (N, HK, tiles, QUERIES, D)
    q = _blocks(query.to(wide).reshape(num_rows, num_key_heads, -1, query.shape[-1]), QUERIES)
    k = _blocks(key.to(wide), KEYS)  # (N, HK, blocks, KEYS, D)
    v = _blocks(F.pad(value.to(wide), (0, 1), value=1.0), KEYS)  # the last column sums the weights
    num_blocks = k.shape[2]
    scores = q[:, :, :, None] @ k[:, :, None].transpose(-1, -2)  # (N, HK, tiles, blocks, QUERIES, KEYS)
    scores *= options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores.masked_fill_(_hidden(positions, num_rows, num_heads // num_key_heads, num_keys, options), -math.inf)
    largest = scores.amax((3, 5), keepdim=True)
    sinks = None
    if options.sinks is not None:
        sinks = (
            options.sinks.to(wide).view(num_key_heads, -1, 1).expand(-1, -1, length).reshape(1, num_key_heads, -1, 1)
        )
        sinks = _blocks(sinks.expand(num_rows, -1, -1, -1), QUERIES)[:, :, :, None]  # as `largest`
        largest = torch.maximum(largest, sinks)
    sums = (scores - largest).exp_() @ v[:, :, None]  # (N, HK, tiles, blocks, QUERIES, DV + 1)
    total = sums[:, :, :, 0]
    for block in range(1, num_blocks):
        total = total + sums[:, :, :, block]
    weight = total[..., -1:]
    if sinks is not None:
        weight = weight + (sinks - largest)[:, :, :, 0].exp()
    out = (total[..., :-1] / weight).flatten(2, 3)[:, :, : num_heads // num_key_heads * length]
    return out.reshape(num_rows, num_heads, length, -1).to(value.dtype)


def _on_gpu(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, options: LayerOptions) -> Tensor:
    from lockstep.kernels.exact_attention import attend

    num_rows, num_keys = key.shape[0], key.shape[2]
    every = torch.arange(num_rows, device=key.device, dtype=torch.int32)  # a row of keys is a block
    out = attend(
        query,
        (key.contiguous(), value.contiguous()),
        every[:, None],
        every,
        positions,
        key_heads=key.shape[1],
        value_dim=value.shape[-1],
        block_size=num_keys,
        scale=options.scaling,
        window=options.sliding_window,
        chunk=options.chunk,
        softcap=options.softcap,
        sinks=options.sinks,
    )
    return out.transpose(1, 2)


def _blocks(rows: Tensor, size: int) -> Tensor:
    """(N, HK, R, D) -> (N, HK, blocks, size, D), padded with zeros."""
    return F.pad(rows, (0, 0, 0, -rows.shape[2] % size)).unflatten(2, (-1, size))


def _hidden(positions: Tensor, num_rows: int, groups: int, num_keys: int, options: LayerOptions) -> Tensor:
    """(N or 1, 1, tiles, blocks, QUERIES, KEYS): keys that a query does not see. Queries that pad a tile see the first key."""
    rows = positions.repeat(1, groups)  # (N or 1, G * Q)
    rows = F.pad(rows, (0, -rows.shape[1] % QUERIES))
    keys = torch.arange(-(-num_keys // KEYS) * KEYS, device=positions.device)
    hidden: Tensor = options.hides(rows[:, :, None], keys) | (keys >= num_keys)
    return hidden.unflatten(2, (-1, KEYS)).unflatten(1, (-1, QUERIES)).transpose(2, 3)[:, None]
