"""Memory of tensors that leaves the device between phases. The tensors stay the same objects: views, buffers and optimizers hold
them, so their storages are emptied and filled again in place."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Parked:
    """tensors: those whose storages are moved; asked for at each move, since an optimizer makes its state at the first step.

    keeps: false for contents that nobody needs again, such as gradients: they come back as zeros.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keeps: bool = True) -> None:
        self._tensors = tensors
        self._keeps = keeps
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, Tensor] = {}  # of each storage, page-locked and reused

    @property
    def is_away(self) -> bool:
        return bool(self._sizes)

    def to_host(self) -> None:
        """No-op if the storages are away already."""
        if self.is_away:
            return
        storages = {id(s): s for s in (tensor.untyped_storage() for tensor in self._tensors())}
        unique = {storage.data_ptr(): storage for storage in storages.values() if storage.nbytes()}
        for number, storage in enumerate(unique.values()):
            size = storage.nbytes()
            if self._keeps:
                if number not in self._host or len(self._host[number]) != size:
                    pinned = storage.device.type == "cuda"
                    self._host[number] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                self._host[number].copy_(_bytes(storage), non_blocking=True)
            self._sizes.append((storage, size))
        if self._sizes and self._sizes[0][0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for storage, _ in self._sizes:
            storage.resize_(0)

    def to_device(self) -> None:
        """No-op if the storages are on the device."""
        for number, (storage, size) in enumerate(self._sizes):
            storage.resize_(size)
            memory = _bytes(storage)
            if self._keeps:
                memory.copy_(self._host[number], non_blocking=True)
            else:
                memory.zero_()
        self._sizes.clear()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """On the device inside, and back on the host if it was there."""
        was_away = self.is_away
        self.to_device()
        try:
            yield
        finally:
            if was_away:
                self.to_host()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
