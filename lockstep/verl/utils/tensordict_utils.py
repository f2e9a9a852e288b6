"""verl.utils.tensordict_utils: batches as TensorDicts.

Columns are tensors, dense or nested (jagged), and lists of objects (NonTensorStack), one entry per row. Values of the whole batch
are NonTensorData. What does not fit together raises AssertionError, as in verl.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.protocol.columns import deep_equal

RAGGED = "_ragged_idx"
"""torch's attribute of a jagged tensor: the dimension whose length differs between rows."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def _stack(items: Iterable[Any]) -> Any:
    rows: list[Any] = [NonTensorData(item) for item in items]
    return NonTensorStack.from_list(rows)


def offsets_of(nested: Any) -> Tensor:
    """Where the rows of a jagged tensor begin and end: (B + 1,)."""
    offsets: Tensor = nested.offsets()
    return offsets


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set a value of the whole batch."""
    _require(isinstance(tensor_dict, TensorDict), f"{type(tensor_dict).__name__} is not a TensorDict")
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: Sequence[Any]) -> None:
    """Set a column of objects, one per row."""
    _require(isinstance(tensor_dict, TensorDict), f"{type(tensor_dict).__name__} is not a TensorDict")
    tensor_dict[key] = _stack(val)


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set several: a list is a column, any other value belongs to the whole batch."""
    for key, val in kwargs.items():
        if isinstance(val, NonTensorData | NonTensorStack):
            tensor_dict[key] = val
        elif isinstance(val, list):
            assign_non_tensor_stack(tensor_dict, key, val)
        else:
            assign_non_tensor_data(tensor_dict, key, val)
    return tensor_dict


def unwrap_non_tensor_data(data: Any) -> Any:
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """A value of the whole batch; `default` without it."""
    return unwrap_non_tensor_data(data.get(key, default))


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> TensorDict:
    """A TensorDict of columns (tensors, lists or arrays of objects) and values of the whole batch."""
    columns: dict[str, Any] = {}
    for key, val in tensor_dict.items():
        if isinstance(val, list | np.ndarray):
            _require(
                not any(isinstance(item, Tensor) for item in val),
                f"{key!r} is a list of tensors: pass one tensor, nested if the rows differ in length",
            )
            columns[key] = _stack(val)
            continue
        _require(isinstance(val, Tensor | NonTensorStack), f"{key!r} is a {type(val).__name__}, not a column")
        if _is_nested(val):
            _require(val.layout == torch.jagged and val.is_contiguous(), f"nested tensor {key!r} must be jagged")
        columns[key] = val
    sizes = {key: val.size(0) if isinstance(val, Tensor) else len(val) for key, val in columns.items()}
    _require(len(set(sizes.values())) <= 1, f"columns have different numbers of rows: {sizes}")
    for key, val in (non_tensor_dict or {}).items():
        _require(key not in columns, f"{key!r} is both a column and a value of the batch")
        columns[key] = NonTensorData(unwrap_non_tensor_data(val))
    return TensorDict(columns, batch_size=[next(iter(sizes.values()))] if sizes else [])


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Rows to columns: scalar tensors are stacked, other tensors become nested ones, anything else is a column of objects."""
    _require(len(list_of_dicts) > 0, "no rows")

    def column(rows: list[Any]) -> Any:
        if not all(isinstance(row, Tensor) for row in rows):
            return _stack(rows)
        return torch.stack(rows) if all(row.dim() == 0 for row in rows) else nested_tensor_from_tensor_list(rows)

    columns = {key: column([row[key] for row in list_of_dicts]) for key in list_of_dicts[0]}
    return TensorDict(columns, batch_size=[len(list_of_dicts)])


def nested_tensor_from_tensor_list(tensors: Sequence[Tensor], ragged_idx: int | None = None) -> Tensor:
    """A jagged tensor of these rows. ragged_idx: the dimension, counted with the batch's, whose length differs; the last one."""
    _require(len(tensors) > 0, "no tensors")
    num_dims = tensors[0].dim()
    ragged_idx = num_dims if ragged_idx is None else ragged_idx
    _require(1 <= ragged_idx <= num_dims, f"ragged_idx={ragged_idx} for rows of {num_dims} dimensions")
    if num_dims == 1:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)
    values = torch.cat(list(tensors), dim=ragged_idx - 1)
    lengths = [0, *(row.shape[ragged_idx - 1] for row in tensors)]
    offsets = torch.tensor(lengths, device=values.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=ragged_idx)


def _rows(nested: Tensor) -> list[Tensor]:
    """The rows of a jagged tensor, also of one whose ragged dimension is not the first (which `unbind` of torch cannot)."""
    ends = offsets_of(nested).tolist()
    return [nested.values().narrow(_ragged(nested) - 1, a, b - a) for a, b in pairwise(ends)]


def _ragged(nested: Tensor) -> int:
    return int(getattr(nested, RAGGED, nested.dim() - 1))


def _renested(nested: Tensor, pick: Callable[[list[Tensor]], list[Tensor]]) -> Tensor:
    return nested_tensor_from_tensor_list(pick(_rows(nested)), _ragged(nested))


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all, as one jagged tensor."""
    for tensor in tensors:
        _require(
            tensor.is_nested and tensor.is_contiguous(), "concat_nested_tensors: each must be nested and contiguous"
        )
        _require(tensor.dim() >= 2, f"concat_nested_tensors: {tensor.dim()} dimensions; there must be at least 2")
    return nested_tensor_from_tensor_list([row for tensor in tensors for row in _rows(tensor)], _ragged(tensors[0]))


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """The rows of all; values of the whole batch are those of the first."""
    _require(len(data) > 0, "no TensorDicts")
    if not data[0].batch_size:
        return concat_tensordict_with_none_bsz(data)
    nested = [key for key, val in data[0].items() if _is_nested(val)]
    for part in data:
        _require(
            [key for key, val in part.items() if _is_nested(val)] == nested, "the parts have different nested columns"
        )
    joined = TensorDict.cat([part.exclude(*nested) for part in data], dim=0)
    for key in nested:
        joined[key] = concat_nested_tensors([part[key] for part in data])
    return joined


def concat_tensordict_with_none_bsz(data: Sequence[TensorDict]) -> TensorDict:
    """The first of several without rows."""
    _require(all(not part.batch_size for part in data), "a part has rows")
    return data[0]


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Equal parts; the rows must divide."""
    _require(len(td) % chunks == 0, f"{len(td)} rows do not divide into {chunks} parts")
    size = len(td) // chunks
    return [index_select_tensor_dict(td, list(range(part * size, (part + 1) * size))) for part in range(chunks)]


def index_select_tensor_dict(batch: TensorDict, indices: Tensor | Sequence[int]) -> TensorDict:
    """The rows with these numbers; values of the whole batch stay."""
    rows = torch.as_tensor(indices)
    _require(rows.dim() == 1, f"indices have shape {tuple(rows.shape)}; they must be a list of row numbers")

    def select(value: Any) -> Any:
        if _is_nested(value):
            return _renested(value, lambda parts: [parts[row] for row in rows.tolist()])
        return NonTensorData(value.data) if isinstance(value, NonTensorData) else value[rows]

    return TensorDict({key: select(batch.get(key)) for key in batch.keys()}, batch_size=[len(rows)])  # noqa: SIM118


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: dict[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches of equal size for several epochs; `dataloader_kwargs={"shuffle": True}` shuffles by `seed`."""
    num_rows = tensordict.batch_size[0]
    _require(num_rows % mini_batch_size == 0, f"{num_rows} rows do not divide into mini-batches of {mini_batch_size}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: DataLoader[int] = DataLoader(
        range(num_rows),  # type: ignore[arg-type]  # any sequence of row numbers works
        batch_size=mini_batch_size,
        collate_fn=list,
        generator=generator,
        **(dataloader_kwargs or {}),
    )
    return (index_select_tensor_dict(tensordict, rows) for _ in range(epochs) for rows in loader)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the entries of the second to the first, in place; shared ones must be equal."""
    _require(
        tensor_dict1.batch_size == tensor_dict2.batch_size,
        f"batch sizes {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)} differ",
    )
    for key in tensor_dict2.keys():  # noqa: SIM118 (a TensorDict is not a mapping)
        if key in tensor_dict1.keys():  # noqa: SIM118
            _require(_equal(tensor_dict1[key], tensor_dict2[key]), f"{key!r} has different values on the two sides")
        else:
            tensor_dict1[key] = tensor_dict2.get(key)
    return tensor_dict1


def _equal(first: Any, second: Any) -> bool:
    if _is_nested(first) or _is_nested(second):
        if not (_is_nested(first) and _is_nested(second)):
            return False
        rows = _rows(first), _rows(second)
        return len(rows[0]) == len(rows[1]) and all(map(torch.equal, *rows))
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return deep_equal(first, second)
    return type(first) is type(second) and deep_equal(first, second)


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """AssertionError that names an entry which differs."""
    names = set(tensordict1.keys()), set(tensordict2.keys())
    _require(names[0] == names[1], f"only one of them has {sorted(names[0] ^ names[1])}")
    for key in names[0]:
        _require(_equal(tensordict1[key], tensordict2[key]), f"{key!r} differs: {tensordict1[key]}, {tensordict2[key]}")


def _native(value: Any) -> Any:
    """A tensor, a list of objects, or a value of the whole batch."""
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """An entry as tensor, list or value."""
    return _native(tensordict.get(key)) if key in tensordict.keys() else default  # noqa: SIM118


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """Remove an entry and return it as tensor, list or value."""
    return _native(tensordict.pop(key)) if key in tensordict.keys() else default  # noqa: SIM118


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """A TensorDict of these entries; KeyError if one is missing."""
    return _picked(tensordict, keys, tensordict.get)


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Remove these entries and return them as a TensorDict; KeyError if one is missing."""
    return _picked(tensordict, keys, tensordict.pop)


def _picked(tensordict: TensorDict, keys: Iterable[str], take: Callable[[str], Any]) -> TensorDict:
    wanted = list(keys)
    for key in wanted:
        if key not in tensordict.keys():  # noqa: SIM118
            raise KeyError(f"no key {key!r} in the TensorDict, which has {sorted(tensordict.keys())}")
    entries = {key: take(key) for key in wanted}
    values = {key: val.data for key, val in entries.items() if isinstance(val, NonTensorData)}
    return get_tensordict({key: val for key, val in entries.items() if key not in values}, values)


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Repeat the first rows at the end until the size is divisible; returns the TensorDict and the number of rows added."""
    _require(isinstance(data, TensorDict), f"{type(data).__name__} is not a TensorDict")
    pad_size = -len(data) % size_divisor
    if not pad_size or not len(data):
        return data, 0
    return index_select_tensor_dict(data, [row % len(data) for row in range(len(data) + pad_size)]), pad_size


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Without the last `pad_size` rows."""
    return index_select_tensor_dict(data, list(range(len(data) - pad_size))) if pad_size else data


def contiguous(data: TensorDict) -> TensorDict:
    """A new TensorDict with contiguous tensors; objects stay as they are."""
    entries: dict[str, Any] = {str(key): data.get(key) for key in data.keys()}  # noqa: SIM118
    values = {key: val.data for key, val in entries.items() if isinstance(val, NonTensorData)}
    columns = {
        key: val.contiguous() if isinstance(val, Tensor) else val for key, val in entries.items() if key not in values
    }
    return get_tensordict(columns, values)


def maybe_fix_3d_position_ids(data: TensorDict) -> None:
    """Restore which dimension of nested 3-D `position_ids` is ragged, which pickling a TensorDict loses."""
    positions = data.get("position_ids", None)
    if _is_nested(positions) and positions.dim() == 3:
        setattr(positions, RAGGED, 2)
