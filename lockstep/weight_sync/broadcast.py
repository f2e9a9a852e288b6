"""A process group that broadcasts buckets from the actor to the rollout's processes."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
