"""Weights and optimizer state in host memory while the device does not need them.

weights     move as a whole between phases (`PinnedBuffer`, `CopyStream`)
moments     stay in host memory; a step streams them through the device in buckets (`OffloadedMoments`):

            copy in        bucket 0 │ bucket 1 │ bucket 2 │ …
            update                  │ bucket 0 │ bucket 1 │ …
            write back                         │ bucket 0 │ …
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.engines.train.optimizer import Piece, PiecewiseAdamW, local, pieces_of

_ALIGNMENT = 512
"""Bytes: alignment of tensors that share one buffer."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class PinnedBuffer:
    """Page-locked host memory for a fixed set of tensors, allocated at the first offload and reused.

    Tensors that share storage (tied weights, adjacent weights) share it again after the move.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def moved(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The tensors on `device`. They are all in one place before, and in the same order at each call."""
        if not tensors or tensors[0].device.type == device.type:
            return list(tensors)
        if device.type != "cpu":
            return _copied(tensors, lambda storages: [s.to(device, non_blocking=True) for s in storages])
        on_host = _copied(tensors, self._copied_in)
        torch.cuda.current_stream(tensors[0].device).synchronize()
        return on_host

    def _copied_in(self, storages: list[Tensor]) -> list[Tensor]:
        sizes = [_aligned(len(storage)) for storage in storages]
        if len(self._memory) < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        places = self._memory[: sum(sizes)].split(sizes)
        return [place[: len(s)].copy_(s, non_blocking=True) for place, s in zip(places, storages)]


class CopyStream:
    """Copies that overlap with the work of the current stream. No-op on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies inside start after what the current stream has launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Let the current stream wait for all copies launched so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class OffloadedMoments:
    """AdamW's moments in page-locked host memory, and the optimizer step that streams them.

    The optimizer's state has its usual names, so checkpoints are the same and read and write host memory directly.
    bucket_bytes: of each moment. The device holds three buckets of both: one arrives, one is updated, one is written back.
    """

    def __init__(self, optimizer: PiecewiseAdamW, device: torch.device, bucket_bytes: int = 2**28) -> None:
        self._optimizer = optimizer
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._parameters: list[Tensor] = optimizer.param_groups[0]["params"]
        self._copy_in, self._copy_out = CopyStream(device), CopyStream(device)
        self._host: list[Tensor] = []
        self._buckets: list[list[tuple[Piece, slice]]] = []  # a piece and its bytes in host memory

    def create(self) -> None:
        """Make the optimizer's state, all zeros, unless it exists."""
        if self._host:
            return
        sizes = [_aligned(local(p).nbytes) for p in self._parameters]
        pinned = self._device.type == "cuda"
        self._host = [torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned) for _ in _MOMENTS]
        for parameter, *parts in zip(self._parameters, *(memory.split(sizes) for memory in self._host)):
            state = self._optimizer.state[parameter]
            shard = local(parameter)
            state["step"] = torch.tensor(0.0)
            for name, part in zip(_MOMENTS, parts):
                moment = part[: shard.nbytes].view(shard.dtype).view(shard.shape)
                # DTensor.from_local would copy it to the device
                sharded = isinstance(parameter, DTensor)
                state[name] = DTensor(moment, parameter._spec, requires_grad=False) if sharded else moment
            width = shard.element_size()
            offset = parts[0].storage_offset()
            for piece in pieces_of(parameter):
                place = slice(offset + piece.start * width, offset + piece.end * width)
                if not self._buckets or place.stop - self._buckets[-1][0][1].start > self._bucket_bytes:
                    self._buckets.append([])
                self._buckets[-1].append((piece, place))

    @torch.no_grad()
    def step(self) -> None:
        """Do what `optimizer.step` does, and free each gradient after use; then host memory holds the new moments."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise the learning-rate schedule warns
        self.create()
        if not self._optimizer.begin_step():
            return
        spans = [slice(bucket[0][1].start, bucket[-1][1].stop) for bucket in self._buckets]
        size = max((span.stop - span.start for span in spans), default=0)
        slots = [[torch.empty(size, dtype=torch.uint8, device=self._device) for _ in _MOMENTS] for _ in range(3)]

        def views(number: int) -> list[Tensor]:
            return [memory[: spans[number].stop - spans[number].start] for memory in slots[number % 3]]

        for number in range(len(spans) + 1):
            self._copy_in.wait()
            if number < len(spans):
                # after the update of number - 2 and, since the current stream waited for it, the write-back of number - 3
                with self._copy_in.copying():
                    for on_device, on_host in zip(views(number), self._host):
                        on_device.copy_(on_host[spans[number]], non_blocking=True)
            if number > 0:
                self._update(self._buckets[number - 1], views(number - 1))
                self._copy_out.wait()
                with self._copy_out.copying():
                    for on_device, on_host in zip(views(number - 1), self._host):
                        on_host[spans[number - 1]].copy_(on_device, non_blocking=True)
        self._copy_out.wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _update(self, bucket: list[tuple[Piece, slice]], slot: list[Tensor]) -> None:
        start = bucket[0][1].start
        for piece, place in bucket:
            if piece.parameter.grad is None:
                continue
            moments = (memory[place.start - start : place.stop - start] for memory in slot)
            self._optimizer.update(piece, *(moment.view(piece.parameter.dtype) for moment in moments))
            if piece.end == local(piece.parameter).numel():
                piece.parameter.grad = None


def move_parameters(
    module: nn.Module, buffer: PinnedBuffer, device: torch.device, *, shared: Collection[nn.Parameter] = ()
) -> None:
    """shared: parameters that stay where they are, because another module moves them."""
    stay = set(map(id, shared))
    parameters = [parameter for parameter in module.parameters() if id(parameter) not in stay]
    if any(isinstance(p, DTensor) for p in parameters):
        module.to(device)
        return
    for parameter, data in zip(parameters, buffer.moved([p.data for p in parameters], device)):
        parameter.data = data


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _copied(tensors: Sequence[Tensor], copy: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """The tensors as views of copied storages; each storage is copied once, as bytes."""
    storages = {_address(t): _bytes(t) for t in tensors}
    copies = dict(zip(storages, copy(list(storages.values()))))
    return [_view_like(t, copies[_address(t)]) for t in tensors]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _view_like(tensor: Tensor, memory: Tensor) -> Tensor:
    """The view of `memory` (bytes) with the offset, shape and strides of `tensor`."""
    offset = memory.storage_offset() // tensor.element_size() + tensor.storage_offset()
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())
