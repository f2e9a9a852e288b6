"""Weight transfer from an actor to a rollout in other processes, as flat buckets of named tensors.

    actor: whole parameters in the rollout's dtype ─► flat bucket ─► object store or broadcast ─► rollout: copied in place

A fingerprint of the bits on both sides tells whether what arrived is what was sent.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.utils.fingerprint import fingerprint


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


def pack_buckets(weights: Iterator[tuple[str, Tensor]], layout: Layout) -> Iterator[Tensor]:
    """Flat bytes of each bucket; `weights` are in the order of the layout."""
    for bucket in layout:
        parts = []
        for entry in bucket:
            name, tensor = next(weights)
            if name != entry.name:
                raise ValueError(f"weight order mismatch: expected {entry.name!r}, got {name!r}")
            parts.append(tensor.detach().to(entry.dtype).contiguous().flatten().view(torch.uint8))
        yield torch.cat(parts)


def unpack_bucket(flat: Tensor, bucket: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of one bucket, as views of its bytes."""
    start = 0
    for entry in bucket:
        piece = flat[start : start + entry.num_bytes]
        if piece.data_ptr() % entry.dtype.itemsize:
            piece = piece.clone()
        yield entry.name, piece.view(entry.dtype).view(entry.shape)
        start += entry.num_bytes


def fingerprint_of(model: nn.Module, layout: Layout) -> int:
    """The fingerprint of all buckets as they would be packed from the model."""
    state = model.state_dict()
    buckets = pack_buckets(((e.name, state[e.name]) for bucket in layout for e in bucket), layout)
    return sum(fingerprint(flat) for flat in buckets)


class BroadcastGroup:
    """A process group of the actor's rank 0, which sends, and all ranks of the rollout, which receive.

    It is separate from the default group of each process: gloo on CPU, NCCL on GPUs.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, device: torch.device, timeout_s: int) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
        store = dist.PrefixStore("weights", self._store)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._device = device

    def send(self, flat: Tensor) -> None:
        self._broadcast(flat.to(self._device))

    def receive(self, num_bytes: int) -> Tensor:
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast(flat)
        return flat

    def _broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([flat], options).wait()


def open_store() -> tuple[dist.TCPStore, str, int]:
    """A store for a BroadcastGroup at this machine's address, which Ray told the worker; returns (store, address, port)."""
    address = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False)
    return store, address, store.port
