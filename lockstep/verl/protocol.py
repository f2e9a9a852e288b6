"""verl.protocol: `DataProto` with verl's exceptions, and its helpers.

`DataProto` is Lockstep's batch. What it refuses raises an AssertionError here, as in verl, which is a ValueError too. Batches
that workers return are Lockstep's own; `isinstance(batch, DataProto)` holds for them.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from lockstep import protocol
from lockstep.protocol import (
    DataProtoFuture as DataProtoFuture,
    DataProtoItem as DataProtoItem,
    fold_batch_dim as fold_batch_dim,
    list_of_dict_to_dict_of_list as list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor as pad_dataproto_to_divisor,
    unfold_batch_dim as unfold_batch_dim,
    unpad_dataproto as unpad_dataproto,
)
from lockstep.verl._names import exports

__getattr__ = exports(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Packed = tuple[str, tuple[int, ...], np.ndarray]
"""dtype, shape and bytes of a tensor."""


class BatchError(AssertionError, ValueError):
    """Batches that do not fit together."""


def _asserting(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with BatchError in place of ValueError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise BatchError(*error.args) from error

    return call


union_tensor_dict = _asserting(protocol.union_tensor_dict)
union_numpy_dict = _asserting(protocol.union_numpy_dict)


class _AutoPadding(type):
    """`DataProtoConfig.auto_padding`, true if it is set to true or VERL_AUTO_PADDING is."""

    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "false").lower() in ("true", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise BatchError(f"DataProtoConfig.auto_padding={enabled!r}: must be a bool")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """`auto_padding`: `chunk` may return a shorter last part. Worker groups pad and unpad in any case."""


class _AnyBatch(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(protocol.DataProto if cls is DataProto else cls, instance)


class DataProto(protocol.DataProto, metaclass=_AnyBatch):
    """See the module docstring. Also in the forms in which programs construct and join batches: `DataProto(batch={"x": tensor})`,
    `split(n_parts=2)`, `union(a, b, c)`."""

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        if isinstance(self.batch, Mapping):
            made = protocol.DataProto.from_dict(dict(self.batch), self.non_tensor_batch)
            self.batch, self.non_tensor_batch = made.batch, made.non_tensor_batch
        super().__post_init__()

    check_consistency = _asserting(protocol.DataProto.check_consistency)
    select_idxs = _asserting(protocol.DataProto.select_idxs)
    chunk = _asserting(protocol.DataProto.chunk)
    sample_level_repeat = _asserting(protocol.DataProto.sample_level_repeat)
    unfold_column_chunks = _asserting(protocol.DataProto.unfold_column_chunks)

    def split(self, split_size: int | None = None, n_parts: int | None = None) -> list[Any]:
        """Parts of `split_size` rows, of which the last may be shorter, or `n_parts` equal parts."""
        if (split_size is None) == (n_parts is None):
            raise TypeError("split needs either split_size, the rows of a part, or n_parts")
        return self.chunk(n_parts) if n_parts is not None else super().split(split_size)  # type: ignore[arg-type]

    def union(self, *others: protocol.DataProto) -> "DataProto":
        """Add the keys of the others in place. Shared keys must have equal values, and the number of rows must match."""
        for other in others:
            _asserting(super().union)(other)
        return self

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, torch.Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        return _asserting(super().from_single_dict)(data, meta_info, auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | protocol.Ragged] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        return _asserting(super().from_dict)(tensors, non_tensors, meta_info, num_batch_dims, auto_padding)

    @staticmethod
    def concat(data: Sequence[protocol.DataProto]) -> "DataProto":
        return adopt(_asserting(protocol.DataProto.concat)(data))

    def is_padding_enabled(self) -> bool:
        return super().is_padding_enabled() or DataProtoConfig.auto_padding

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[protocol.DataProto]:
        if len(self) % mini_batch_size:
            raise BatchError(f"make_iterator: {len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        return super().make_iterator(mini_batch_size, epochs, seed, dataloader_kwargs)

    def get_data_info(self) -> str:
        """Names, shapes, types and devices of the columns, and the keys of meta_info, one per line."""
        tensors = {} if self.batch is None else dict(self.batch.items())
        lines = [f"batch {name}: {tuple(t.shape)} ({t.dtype}) {t.device}" for name, t in tensors.items()]
        lines += [f"non_tensor_batch {name}: {len(v)} ({v.dtype})" for name, v in self.non_tensor_batch.items()]
        return "\n".join([*lines, *(f"meta_info {name}: {type(v).__name__}" for name, v in self.meta_info.items())])


def adopt(data: protocol.DataProto) -> DataProto:
    """A batch of Lockstep's own class as one of this class; tensors are shared."""
    own = issubclass(type(data), DataProto)  # `isinstance` holds for both
    return data if own else DataProto(data.batch, data.non_tensor_batch, data.meta_info)  # type: ignore[return-value]


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Collate rows to a batch. meta_info is the first row's."""
    return adopt(_asserting(protocol.collate_fn)(x))


def serialize_single_tensor(obj: torch.Tensor) -> Packed:
    """(dtype, shape, bytes) of a dense tensor."""
    flat = obj.detach().cpu().contiguous().flatten()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), flat.view(torch.uint8).numpy()


def deserialize_single_tensor(arr: tuple[str, Sequence[int], Any]) -> torch.Tensor:
    """The inverse of `serialize_single_tensor`, in writable memory."""
    dtype, shape, raw = arr
    if not len(raw):
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    values = np.frombuffer(raw, dtype=np.uint8).copy()
    return torch.from_numpy(values).view(getattr(torch, dtype)).reshape(tuple(shape))


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]:
    """(batch size, device, name -> (layout, packed tensor)); a nested tensor is a list of its packed rows."""
    columns: dict[str, tuple[str, Any]] = {}
    for name in batch.keys():  # noqa: SIM118 (a TensorDict is not a mapping)
        value: torch.Tensor = batch[name]
        rows = [serialize_single_tensor(row) for row in value.unbind()] if value.is_nested else None
        columns[str(name)] = str(value.layout).removeprefix("torch."), rows or serialize_single_tensor(value)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), columns


def deserialize_tensordict(arr: tuple[Sequence[int], str | None, Mapping[str, tuple[str, Any]]]) -> TensorDict:
    """The inverse of `serialize_tensordict`."""
    batch_size, device, columns = arr
    tensors: dict[str, torch.Tensor] = {}
    for name, (layout, packed) in columns.items():
        if isinstance(packed, list):
            rows = [deserialize_single_tensor(row) for row in packed]
            tensors[name] = torch.nested.as_nested_tensor(rows, layout=getattr(torch, layout))
        else:
            tensors[name] = deserialize_single_tensor(packed)
    return TensorDict(tensors, batch_size=batch_size, device=device)


def all_gather_data_proto(data: protocol.DataProto, process_group: dist.ProcessGroup) -> None:
    """Give every rank of the group the rows of all its ranks, in rank order, in place."""
    device = None if data.batch is None else data.batch.device
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, (data.batch, data.non_tensor_batch), group=process_group)
    joined = DataProto.concat([DataProto(tensors, arrays) for tensors, arrays in parts])
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch
    if device is not None:
        data.to(device)
