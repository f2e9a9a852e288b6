"""DataProto in Ray's object store: each tensor's bytes as a numpy array, which Ray reads without pickling or copying.

A batch read from the store shares its memory with all other readers, so it must not be written to: `unpack` copies
unless the reader promises not to write, and `check_unwritten` verifies that it did not.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lockstep.protocol import DataProto, Ragged
from lockstep.protocol.columns import batch_of_stored, bytes_of, stored_columns, tensor_of_bytes


@dataclass(frozen=True)
class _Column:
    dtype: torch.dtype
    shape: tuple[int, ...]
    raw: np.ndarray


@dataclass(frozen=True)
class _Packed:
    """A DataProto, or a subclass with the same fields. Columns that are not dense tensors are kept unchanged."""

    cls: type[DataProto]
    batch_size: tuple[int, ...] | None
    columns: dict[str, Any]
    names: list[str] | None
    arrays: dict[str, np.ndarray]
    meta_info: dict[str, Any]


def pack(value: Any) -> Any:
    """A DataProto in its stored form, without copying CPU tensors; any other value is pickled."""
    if isinstance(value, TensorDict):
        return value.clone()  # pickling a view would store the whole batch
    if not isinstance(value, DataProto):
        return value
    if value.batch is None:
        return _Packed(type(value), None, {}, None, value.non_tensor_batch, value.meta_info)
    stored, names = stored_columns(value.batch)
    columns = {key: _pack_tensor(column) for key, column in stored.items()}
    return _Packed(type(value), tuple(value.batch.batch_size), columns, names, value.non_tensor_batch, value.meta_info)


def unpack(value: Any, writable: bool = True) -> Any:
    """The inverse of `pack`. Tensors are on the CPU; without `writable` they may share the store's memory."""
    if not isinstance(value, _Packed):
        return value
    batch = None
    if value.batch_size is not None:
        columns = {key: _unpack_tensor(column, writable) for key, column in value.columns.items()}
        batch = batch_of_stored(columns, value.names, value.batch_size)
    arrays = {k: _writable(v) if writable else v for k, v in value.arrays.items()}
    return value.cls(batch, arrays, value.meta_info)


def tensors_in(values: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """Every dense tensor of the batches among `values`, with its key."""
    batches = [value.batch for value in values if isinstance(value, DataProto) and value.batch is not None]
    columns = [item for batch in batches for item in stored_columns(batch)[0].items()]
    return [(key, column) for key, column in columns if type(column) is torch.Tensor]


def check_unwritten(tensors: Iterable[tuple[str, torch.Tensor]], method: str) -> None:
    """Raise ValueError if a tensor from `unpack(..., writable=False)`, or a view of it, has been written to."""
    for key, tensor in tensors:
        if tensor._version:
            raise ValueError(
                f"{method} wrote in place into batch key {key!r} of its argument, which other workers may be reading; "
                f"clone the tensor first"
            )


def _pack_tensor(tensor: Any) -> Any:
    if isinstance(tensor, Ragged):
        return replace(tensor, values=_pack_tensor(tensor.values), lengths=_pack_tensor(tensor.lengths))
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return _Column(tensor.dtype, tuple(tensor.shape), bytes_of(tensor))


def _unpack_tensor(column: Any, writable: bool) -> Any:
    if isinstance(column, Ragged):
        values, lengths = (_unpack_tensor(part, writable) for part in (column.values, column.lengths))
        return replace(column, values=values, lengths=lengths)
    if not isinstance(column, _Column):
        return column
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return tensor_of_bytes(_writable(column.raw) if writable else column.raw, column.dtype, column.shape)


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else array.copy()
