"""What a rotary module gives for positions, computed once for each and looked up from then on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOVING_ROPES = ("dynamic", "longrope")
"""Their frequencies change with the longest position of a call, also for the rows beside it; they have no table."""

LARGEST_TABLE = 1 << 16
"""Positions beyond are computed when they come."""


def pair_order(head_dim: int) -> Tensor:
    """Elements of a head so that those that the rotary embedding turns together lie side by side."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def as_numbers(cos: Tensor, sin: Tensor) -> Tensor:
    """(P, D) each -> (P, D): real and imaginary parts in turn of the complex numbers that turn pairs of elements."""
    return torch.stack([t.chunk(2, 1)[0] for t in (cos, sin)], 2).flatten(1)


class RotaryTable:
    """arrange: cos and sin (P, D) -> what is kept, with the positions along `dim`."""

    def __init__(self, arrange: Callable[[Tensor, Tensor], Tensor], dim: int) -> None:
        self._arrange, self._dim = arrange, dim
        self._table = torch.empty(0, 0)

    def __call__(self, rotary: Callable[[Tensor, Tensor], Any], like: Tensor, position_ids: Tensor) -> Tensor:
        """rotary: gives cos and sin (1, T, D), of the type of `like`, for positions (1, T)."""
        longest = int(position_ids.max())
        if longest >= LARGEST_TABLE:
            return self._computed(rotary, like, position_ids)
        if longest >= self._table.shape[self._dim] or like.dtype != self._table.dtype:
            self._table = self._computed(rotary, like, torch.arange(2 * longest + 2)[None])
        return self._table.index_select(self._dim, position_ids[0])

    def _computed(self, rotary: Callable[[Tensor, Tensor], Any], like: Tensor, position_ids: Tensor) -> Tensor:
        cos, sin = rotary(like, position_ids)
        return self._arrange(cos[0], sin[0])
