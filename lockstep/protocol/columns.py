"""Columns of a batch (tensors and object arrays): equality, union, concatenation, row selection, pickling."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lockstep.protocol.ragged import Ragged, RaggedBatch, is_ragged

Batch = TensorDict | RaggedBatch
"""The tensors of a batch: padded, or without padding."""


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A 1-D object array with one entry per value; lists of equal length do not become a second axis."""
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        array[i] = row
    return array


def tensors_of(batch: Batch | None) -> dict[str, torch.Tensor]:
    """The columns as a plain dict, padded; empty for None."""
    if is_ragged(batch):
        return {key: batch.read(key) for key in names_of(batch)}
    return {} if batch is None else {key: batch.get(key) for key in names_of(batch)}


def stored_columns(batch: Batch) -> tuple[dict[str, torch.Tensor | Ragged], list[str] | None]:
    """The columns as they are stored, and the names of those that a batch without padding has; None of a padded one."""
    if is_ragged(batch):
        return batch.pack().columns, batch.keys()
    return {**tensors_of(batch)}, None


def batch_of_stored(columns: dict[str, Any], names: list[str] | None, batch_size: Sequence[int]) -> Batch:
    """The inverse of `stored_columns`."""
    return (
        TensorDict(columns, batch_size=batch_size)
        if names is None
        else RaggedBatch(columns, names, num_rows=batch_size[0])
    )


def names_of(batch: Batch | None) -> list[str]:
    """The names of the columns; empty for None."""
    return [] if batch is None else [str(key) for key in batch.keys()]  # noqa: SIM118


def deep_equal(a: Any, b: Any) -> bool:
    """Equality of nested values; NaN equals NaN, tensors and arrays compare by shape and content."""
    if a is b:
        return True
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return a.equals(b)
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return deep_equal(*(x.padded() if isinstance(x, Ragged) else x for x in (a, b)))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors_equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(deep_equal(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(deep_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(deep_equal(x, y) for x, y in zip(a, b))
    if isinstance(a, (torch.Tensor, np.ndarray)) or isinstance(b, (torch.Tensor, np.ndarray)):
        return False
    return bool(a == b) or bool(a != a and b != b)


def _tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def union_tensor_dict(tensor_dict1: Batch, tensor_dict2: Batch) -> Batch:
    """Add the tensors of the second to the first, in place; shared keys must have equal values."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ValueError(
            f"union: the batches have {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)} rows "
            f"(keys {sorted(tensor_dict1.keys())} and {sorted(tensor_dict2.keys())})"
        )
    if is_ragged(tensor_dict2) and not is_ragged(tensor_dict1):
        tensor_dict1 = RaggedBatch(tensors_of(tensor_dict1), num_rows=len(tensor_dict1))
    shared = [key for key in names_of(tensor_dict2) if key in names_of(tensor_dict1)]
    mine, theirs = ({key: _stored(batch, key) for key in shared} for batch in (tensor_dict1, tensor_dict2))
    _refuse_conflicts("batch key", mine, theirs)
    added: Any = tensor_dict2.select(*(key for key in names_of(tensor_dict2) if key not in shared))
    tensor_dict1.update(added)
    return tensor_dict1


def _stored(batch: Batch, key: str) -> torch.Tensor | Ragged:
    """A column as it is stored, or if it is not, in padded form."""
    if not is_ragged(batch):
        return batch.get(key)
    column = batch.pack().stored(key)
    return batch.read(key) if column is None else column


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place; shared keys must have equal values."""
    _refuse_conflicts("non-tensor key", tensor_dict1, tensor_dict2)
    tensor_dict1.update({k: v for k, v in tensor_dict2.items() if k not in tensor_dict1})
    return tensor_dict1


def union_meta_info(meta1: dict[str, Any], meta2: dict[str, Any]) -> dict[str, Any]:
    """Add the entries of the second to the first, in place; shared keys must have equal values."""
    _refuse_conflicts("meta_info key", meta1, meta2)
    meta1.update({k: v for k, v in meta2.items() if k not in meta1})
    return meta1


def _refuse_conflicts(kind: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    for key in second:
        if key in first and not deep_equal(first[key], second[key]):
            raise ValueError(f"{kind} {key!r} has different values on the two sides; rename or pop one of them first")


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """[{a: 1}, {a: 2, b: 3}] → {a: [1, 2], b: [3]}."""
    merged: dict[str, list[Any]] = {}
    for entry in list_of_dict:
        for key, value in entry.items():
            merged.setdefault(key, []).append(value)
    return merged


def common_batch_size(tensors: Mapping[str, torch.Tensor | Ragged], num_batch_dims: int) -> tuple[int, ...]:
    """The leading dimensions shared by all tensors; an error names a tensor that differs."""
    first = next(iter(tensors))
    sizes = {k: tuple(v.shape[:num_batch_dims]) for k, v in tensors.items()}
    for key, size in sizes.items():
        if len(size) < num_batch_dims or size != sizes[first]:
            raise ValueError(f"batch key {key!r} has batch size {size}, {first!r} has {sizes[first]}")
    return sizes[first]


def concat_tensors(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows of all batches; an error names a column whose shapes differ."""
    if any(is_ragged(batch) for batch in batches):
        return RaggedBatch.concat(batches)
    columns = {}
    for key in tensors_of(batches[0]):
        parts = [batch[key] for batch in batches]
        if parts[0].is_nested:
            rows = [row for part in parts for row in part.unbind()]
            columns[key] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            continue
        for i, part in enumerate(parts):
            if part.shape[1:] != parts[0].shape[1:]:
                shapes = f"{tuple(parts[0].shape)} in part 0 and {tuple(part.shape)} in part {i}"
                raise ValueError(f"concat: batch key {key!r} has shape {shapes}")
        columns[key] = torch.cat(parts, dim=0)
    batch_size = (sum(batch.batch_size[0] for batch in batches), *batches[0].batch_size[1:])
    return TensorDict(columns, batch_size=batch_size)


def concat_meta_info(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the meta_info of concatenated parts: values must be equal, `metrics` become a dict of lists, `findings` are joined."""
    merged: dict[str, Any] = {}
    metrics: list[dict[str, Any]] = []
    for meta in metas:
        for key, value in meta.items():
            if key == "metrics":
                metrics.extend(value if isinstance(value, list) else [value] if value is not None else [])
            elif key == "findings":  # of audits, by name: those of the first rank that has one
                merged[key] = value | merged.get(key, {})
            elif key in merged and not deep_equal(merged[key], value):
                raise ValueError(
                    f"concat: meta_info key {key!r} is {merged[key]!r} in one part and {value!r} in another"
                )
            else:
                merged[key] = value
    if metrics:
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics)
    return merged


def pack_tensor(value: Any) -> Any:
    """A tensor as (dtype, shape, bytes) of only its own rows, even if it is a view of a larger batch.

    Default pickling would include the whole storage behind each shard. Values that are not dense tensors are unchanged.
    """
    if isinstance(value, Ragged):
        return replace(value, values=pack_tensor(value.values), lengths=pack_tensor(value.lengths))
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_nested:
        return value
    return value.dtype, tuple(value.shape), bytes_of(value).copy()


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a dense tensor, without a copy if it is on the CPU and contiguous."""
    flat = tensor.detach().cpu().contiguous().flatten()
    if flat.stride(0) != 1:  # possible for one entry or none
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8).numpy()


def unpack_tensor(packed: Any) -> Any:
    """The inverse of `pack_tensor`; the tensor is on the CPU in writable memory."""
    if isinstance(packed, Ragged):
        return replace(packed, values=unpack_tensor(packed.values), lengths=unpack_tensor(packed.lengths))
    if not isinstance(packed, tuple):
        return packed
    dtype, shape, raw = packed
    if not raw.flags.writeable:
        raw = raw.copy()
    return tensor_of_bytes(raw, dtype, shape)


def tensor_of_bytes(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `bytes_of`, in the memory of `raw`."""
    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)
