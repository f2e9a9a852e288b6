"""Flat buckets of named tensors, the unit in which weights are sent.

whole parameters in the rollout's dtype ─► flat bytes of each bucket ─► … ─► named tensors, as views of the bytes
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Layout = list[list[Entry]]
"""The tensors of each bucket, in order."""


def layout_of(parameters: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype, max_bytes: int) -> Layout:
    """Buckets of at most `max_bytes`, or of one tensor that is larger."""
    layout: Layout = []
    size = max_bytes
    for name, shape in parameters:
        entry = Entry(name, shape, dtype)
        if size + entry.num_bytes > max_bytes:
            layout.append([])
            size = 0
        layout[-1].append(entry)
        size += entry.num_bytes
    return layout


def names_of(layout: Layout) -> list[str]:
    return [entry.name for bucket in layout for entry in bucket]


def cast_buckets(weights: Iterator[tuple[str, Tensor]], layout: Layout) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of each bucket in the layout's dtype; `weights` are in the order of the layout."""
    for bucket in layout:
        tensors = []
        for entry in bucket:
            name, tensor = next(weights)
            if name != entry.name:
                raise ValueError(f"weight order mismatch: expected {entry.name!r}, got {name!r}")
            tensors.append((name, tensor.detach().to(entry.dtype)))
        yield tensors


def pack_bucket(tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
    """The flat bytes of one bucket."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors])


def unpack_bucket(flat: Tensor, bucket: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of one bucket, as views of its bytes."""
    start = 0
    for entry in bucket:
        piece = flat[start : start + entry.num_bytes]
        if piece.data_ptr() % entry.dtype.itemsize:
            piece = piece.clone()
        yield entry.name, piece.view(entry.dtype).view(entry.shape)
        start += entry.num_bytes
