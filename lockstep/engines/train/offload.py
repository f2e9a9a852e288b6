"""Tensors that are on the device only in the phases that need them, and in host memory between."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ALIGNMENT = 512
"""Bytes: where a storage begins in memory that several share."""


class HostHome:
    """Host memory of one owner's tensors: page-locked, made at the first departure from the device and kept.

    Tensors that share storage (tied ones, weights laid side by side) share it again where they arrive.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def moved(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The tensors on the device, or at home; those of an owner are all in one place, and given in the same order."""
        if not tensors or tensors[0].device.type == device.type:
            return list(tensors)
        if device.type != "cpu":
            return _copied(tensors, lambda storages: [s.to(device, non_blocking=True) for s in storages])
        at_home = _copied(tensors, self._arrivals)
        torch.cuda.current_stream(tensors[0].device).synchronize()
        return at_home

    def _arrivals(self, storages: list[Tensor]) -> list[Tensor]:
        sizes = [-(-len(storage) // _ALIGNMENT) * _ALIGNMENT for storage in storages]
        if len(self._memory) < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        places = self._memory[: sum(sizes)].split(sizes)
        return [place[: len(s)].copy_(s, non_blocking=True) for place, s in zip(places, storages)]


class Arrival:
    """What is copied to the device beside the work that is launched there meanwhile, and must be waited for before it is used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._awaited: torch.cuda.Stream | None = None

    @contextmanager
    def begin(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # with what may still read that memory
        with torch.cuda.stream(self._stream):
            yield
        self._awaited = self._stream

    def wait(self) -> None:
        if self._awaited is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._awaited)
            self._awaited = None


def move_parameters(module: nn.Module, home: HostHome, device: torch.device) -> None:
    parameters = list(module.parameters())
    if any(isinstance(p, DTensor) for p in parameters):
        module.to(device)
        return
    for parameter, data in zip(parameters, home.moved([p.data for p in parameters], device)):
        parameter.data = data


def move_optimizer(optimizer: torch.optim.Optimizer, home: HostHome, device: torch.device) -> None:
    """Its state but for the step counts, which are where the optimizer wants them."""
    held = [(state, name) for state in optimizer.state.values() for name in state if name != "step"]
    values = [state[name] for state, name in held]
    sharded = any(isinstance(value, DTensor) for value in values)
    moved = [value.to(device) for value in values] if sharded else home.moved(values, device)
    for (state, name), value in zip(held, moved):
        state[name] = value


def _copied(tensors: Sequence[Tensor], copy: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """The tensors as they lie in copies of their storages, each of which is copied once, as bytes."""
    storages = {_address(t): _bytes(t) for t in tensors}
    copies = dict(zip(storages, copy(list(storages.values()))))
    return [_view_like(t, copies[_address(t)]) for t in tensors]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _view_like(tensor: Tensor, storage: Tensor) -> Tensor:
    """The part of `storage` (bytes) that has the place and the layout of `tensor`."""
    if not tensor.numel():
        return tensor.new_empty(tensor.shape, device=storage.device)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.storage_offset() * tensor.element_size()
    part = storage[start : start + (last + 1) * tensor.element_size()].view(tensor.dtype)
    return part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
