"""Devices: choice, transfers and memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakMethod

import torch
from torch import Tensor

from lockstep.utils.metrics import MaxOverRanks


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to the device; to CUDA without synchronising."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class HostCopy:
    """An asynchronous copy to the host; `read` waits only for work launched before the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach()
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor.detach(), non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def resolve_device(name: str) -> str:
    """`auto` is cuda if there is a GPU, else cpu; asking for a missing GPU is an error."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda: no CUDA device is visible; set trainer.device=cpu or auto")
    return name


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a CUDA device: free, or cached by torch outside of CUDA-graph pools."""
    free, _ = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == index and s["segment_pool_id"] == (0, 0))
    return int(free) + sum(s["total_size"] - s["active_size"] for s in segments)


@cache
def memory_peaks(device: torch.device) -> "MemoryPeaks":
    """The peaks of this process; its workers share the device's counters."""
    return MemoryPeaks(device)


class MemoryPeaks:
    """CUDA memory of this process per phase of a step, and its peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: dict[str, float] = {}
        self._allocated = self._reserved = 0
        self._released: WeakMethod[Callable[[], int]] | None = None

    def subtract(self, released: Callable[[], int]) -> None:
        """Ask this method for bytes that torch counts as allocated although they are released, as long as its object lives."""
        self._released = WeakMethod(released)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block; phases must not overlap, and a rollout engine neither wakes nor sleeps inside."""
        if self._device.type != "cuda":
            yield
            return
        self._note()
        yield
        peak = self._note()
        free, total = torch.cuda.mem_get_info(self._device)
        self._phases |= {
            f"perf/max_memory_allocated_gb/{name}": MaxOverRanks(peak / 2**30),
            f"perf/memory_used_gb/{name}": (total - free) / 2**30,
        }

    def metrics(self) -> dict[str, float]:
        """Peaks since the process started, and of the last run of each phase; empty on CPU."""
        if self._device.type != "cuda":
            return {}
        self._note()
        return {
            "perf/max_memory_allocated_gb": MaxOverRanks(self._allocated / 2**30),
            "perf/max_memory_reserved_gb": MaxOverRanks(self._reserved / 2**30),
            **self._phases,
        }

    def _note(self) -> int:
        """Note the peaks since the last call; returns the allocated one."""
        method = self._released() if self._released is not None else None
        released = method() if method is not None else 0
        allocated = torch.cuda.max_memory_allocated(self._device) - released
        self._allocated = max(self._allocated, allocated)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device) - released)
        torch.cuda.reset_peak_memory_stats(self._device)
        return allocated
