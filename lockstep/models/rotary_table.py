"""What a rotary module gives for positions, computed once for each and looked up from then on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOVING_ROPES = ("dynamic", "longrope")
"""Their frequencies change with the longest position of a call, also for the rows beside it."""

LARGEST_TABLE = 1 << 16
"""Positions beyond are computed when they come."""


def stands_still(rotary: Any, like: Tensor) -> bool:
    """Whether what a rotary module gives for a position depends on that position alone, so that a table can hold it.

    False too for one that wants other arguments than `like` and positions.
    """
    if getattr(rotary, "rope_type", None) in MOVING_ROPES:
        return False
    far = min(getattr(getattr(rotary, "config", None), "max_position_embeddings", 4), LARGEST_TABLE) - 1
    near = torch.tensor([[1, 2, 3]])
    try:
        alone, beside = (rotary(like, positions) for positions in (near, torch.cat((near, torch.tensor([[far]])), 1)))
        return all(torch.equal(a, b[:, :3]) for a, b in zip(alone, beside))
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        return False


def pair_order(head_dim: int) -> Tensor:
    """Elements of a head so that those that the rotary embedding turns together lie side by side."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def as_numbers(cos: Tensor, sin: Tensor, times: int = 1) -> Tensor:
    """(P, D) each -> (P, times * D): real and imaginary parts in turn of the complex numbers that turn pairs of elements."""
    return torch.stack([t.chunk(2, 1)[0] for t in (cos, sin)], 2).flatten(1).repeat(1, times)


class RotaryTable:
    """arrange: cos and sin (P, D) -> what is kept, with the positions along `dim`."""

    def __init__(self, arrange: Callable[[Tensor, Tensor], Tensor], dim: int) -> None:
        self._arrange, self._dim = arrange, dim
        self._table = torch.empty(0, 0)
        self._frequencies: Tensor | None = None

    def __call__(self, rotary: Any, like: Tensor, position_ids: Tensor) -> Tensor:
        """rotary: the module, which gives cos and sin (1, T, D), of the type of `like`, for positions (1, T)."""
        longest = int(position_ids.max())
        if longest >= LARGEST_TABLE:
            return self._computed(rotary, like, position_ids)
        frequencies = getattr(rotary, "inv_freq", None)
        is_as_it_was = frequencies is self._frequencies and like.dtype == self._table.dtype
        if longest >= self._table.shape[self._dim] or not is_as_it_was:
            self._table = self._computed(rotary, like, torch.arange(longest + 1)[None])
            self._frequencies = frequencies
        return self._table.index_select(self._dim, position_ids[0])

    def _computed(self, rotary: Any, like: Tensor, position_ids: Tensor) -> Tensor:
        cos, sin = rotary(like, position_ids)
        return self._arrange(cos[0], sin[0])
