"""DataProto: the batch of a training step and its operations.

A batch has B rows and three parts:

    batch             tensors with B as their first dimension; those of rollouts are kept without padding (`protocol/ragged.py`)
    non_tensor_batch  numpy arrays of B entries, mostly objects (uid, raw_prompt, ...)
    meta_info         values for the whole batch (temperature, metrics, ...)

Every stage takes a DataProto and returns one with more keys; `lockstep.protocol.keys` lists them. Operations return new
batches that share tensor memory if possible; `union`, `rename`, `reorder`, `padding`, `pop` and `to` modify the batch in
place. `meta_info` is copied shallowly.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from lockstep.protocol.columns import (
    Batch,
    batch_of_stored,
    common_batch_size,
    concat_meta_info,
    concat_tensors,
    names_of,
    object_array,
    pack_tensor,
    stored_columns,
    tensors_of,
    union_meta_info,
    union_numpy_dict,
    union_tensor_dict,
    unpack_tensor,
)
from lockstep.protocol.images import IMAGES, column_of_state, column_state
from lockstep.protocol.ragged import Ragged, RaggedBatch, entries_of, is_ragged, row_numbers
from lockstep.utils.state_file import from_bytes, to_bytes

logger = logging.getLogger(__name__)

AUTO_PADDING_KEY = "_auto_padding"
"""meta_info key: `chunk` may return a shorter last part."""

Index = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its objects, and the batch's meta_info."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """See the module docstring. `batch` is None if there are only non-tensor keys."""

    batch: Batch | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    @property
    def tensors(self) -> Batch:
        """`batch`; an error if the batch has no tensors."""
        if self.batch is None:
            raise ValueError(f"the batch has no tensors, only {sorted(self.non_tensor_batch)}")
        return self.batch

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, torch.Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Build a batch from one dict: tensors go to `batch`, numpy arrays to `non_tensor_batch`."""
        tensors, non_tensors = {}, {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                non_tensors[key] = value
            else:
                raise ValueError(f"key {key!r} is a {type(value).__name__}; a batch holds tensors and numpy arrays")
        return cls.from_dict(tensors, non_tensors, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | Ragged] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Build a batch from tensors with the same first `num_batch_dims` dimensions, and arrays or lists.

        With ragged columns the batch is kept without padding, and gets the keys that can be derived.
        """
        if num_batch_dims < 1:
            raise ValueError(f"num_batch_dims is {num_batch_dims}; a batch has at least one batch dimension")
        if num_batch_dims > 1 and non_tensors:
            raise ValueError(
                f"num_batch_dims={num_batch_dims} is for tensors only; got non-tensor keys {sorted(non_tensors)}"
            )
        arrays = {k: v if isinstance(v, np.ndarray) else object_array(v) for k, v in (non_tensors or {}).items()}
        meta = dict(meta_info or {})
        if auto_padding:
            meta[AUTO_PADDING_KEY] = True
        if not tensors:
            return cls(None, arrays, meta)
        batch_size = common_batch_size(tensors, num_batch_dims)
        if any(isinstance(column, Ragged) for column in tensors.values()):
            return cls(RaggedBatch(tensors), arrays, meta)
        return cls(TensorDict(dict(tensors), batch_size=batch_size), arrays, meta)

    def outputs(self, tensors: dict[str, torch.Tensor]) -> "DataProto":
        """A batch of results (B, R) for these rows, without padding if these have none."""
        responses = self.batch.pack().stored("responses") if is_ragged(self.batch) else None
        if not isinstance(responses, Ragged):
            return DataProto.from_dict(tensors)
        lengths = entries_of(responses)
        return DataProto.from_dict({name: Ragged.of_padded(column, lengths) for name, column in tensors.items()})

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None = None, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """The inverse of `to_tensordict`; `meta_info` adds to the entries of the TensorDict."""
        tensors: dict[str, torch.Tensor] = {}
        non_tensors: dict[str, np.ndarray] = {}
        meta: dict[str, Any] = {}
        entries: dict[str, Any] = {**tensors_of(tensor_dict)}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                non_tensors[key] = object_array(value.tolist())
        return cls.from_dict(tensors, non_tensors, meta | (meta_info or {}), num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: the columns, objects as NonTensorStack, and the entries of `meta_info` as NonTensorData."""
        out = TensorDict(tensors_of(self.batch), batch_size=[len(self)])
        for key, column in self.non_tensor_batch.items():
            out[key] = NonTensorStack(*column.tolist())
        for key, value in self.meta_info.items():
            if key in self._columns():
                raise ValueError(
                    f"to_tensordict: {key!r} is both a column and a meta_info key; rename one of them first"
                )
            out.set_non_tensor(key, value)
        return out

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(v) for v in self.non_tensor_batch.values()), 0)

    def check_consistency(self) -> None:
        """Check that every column has one entry per row; ValueError names one that does not."""
        if self.batch is not None and len(self.batch.batch_size) < 1:
            raise ValueError("batch has no batch dimension; give TensorDict a batch_size of [B]")
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise ValueError(f"non-tensor key {key!r} is a {type(value).__name__}; it must be a numpy array")
            if value.ndim < 1 or len(value) != len(self):
                raise ValueError(f"non-tensor key {key!r} has shape {value.shape} in a batch of {len(self)} rows")

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> "DataProto": ...

    def __getitem__(self, item: Any) -> "DataProtoItem | DataProto":
        """A row for an int; a batch for a slice, a list of rows or a mask."""
        if isinstance(item, (int, np.integer)):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} is out of range for a batch of {len(self)} rows")
            row = None if self.batch is None else self.batch[int(item)]
            return DataProtoItem(row, {k: v[item] for k, v in self.non_tensor_batch.items()}, dict(self.meta_info))
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        return self.select_idxs(item)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Rows start:end:step, sharing memory with this batch."""
        rows = slice(start, end, step)
        batch = None if self.batch is None else self.batch[rows]
        return self._with_rows(batch, {k: v[rows] for k, v in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> "DataProto":
        """Rows by number, in the given order and possibly repeated, or by boolean mask."""
        rows = row_numbers(idxs, len(self))
        batch = None if self.batch is None else self.batch[torch.from_numpy(rows)]
        return self._with_rows(batch, {k: v[rows] for k, v in self.non_tensor_batch.items()})

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """A batch with only the given keys; None keeps all keys of that part."""
        self._require_keys(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = self.batch
        if batch is not None:
            batch = batch.copy() if batch_keys is None else batch.select(*batch_keys)
        arrays = _subset(self.non_tensor_batch, non_tensor_batch_keys)
        meta = _subset(self.meta_info, meta_info_keys)
        if deepcopy:
            batch = None if batch is None else batch.clone()
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return type(self)(batch, arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Remove the given keys from this batch and return them as a batch; None removes nothing from that part."""
        self._require_keys(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = None
        if self.batch is not None and batch_keys:
            batch = self.batch.select(*batch_keys)
            for key in batch_keys:
                del self.batch[key]
        arrays = {k: self.non_tensor_batch.pop(k) for k in non_tensor_batch_keys or ()}
        meta = {k: self.meta_info.pop(k) for k in meta_info_keys or ()}
        return type(self)(batch, arrays, meta)

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> "DataProto":
        """Rename columns in place, one or several at once, tensor or not."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        if len(old) != len(new) or len(set(new)) != len(new):
            raise ValueError(f"rename needs one new name per old name; got {old} and {new}")
        kept = self._columns() - set(old)
        for key, target in zip(old, new):
            if key not in self._columns():
                raise KeyError(f"rename: no key {key!r} in the batch, which has {sorted(self._columns())}")
            if target in kept:
                raise ValueError(f"rename: {key!r} cannot become {target!r}, which the batch already has")
        table = dict(zip(old, new))
        if is_ragged(self.batch):
            self.batch = self.batch.renamed({key: target for key, target in table.items() if key in self.batch})
        elif self.batch is not None:
            renamed = {table.get(k, k): v for k, v in tensors_of(self.batch).items()}
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size)
        self.non_tensor_batch = {table.get(k, k): v for k, v in self.non_tensor_batch.items()}
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the keys of `other` in place. Shared keys must have equal values, and the number of rows must match."""
        if self._columns() and other._columns() and len(self) != len(other):
            mine, theirs = sorted(self._columns()), sorted(other._columns())
            raise ValueError(f"union: {len(self)} rows of {mine} and {len(other)} rows of {theirs}")
        if self.batch is None or other.batch is None:
            batch = other.batch.copy() if self.batch is None and other.batch is not None else self.batch
        else:
            batch = union_tensor_dict(self.batch.copy(), other.batch)
        arrays = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        meta = union_meta_info(dict(self.meta_info), other.meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, meta
        return self

    def is_padding_enabled(self) -> bool:
        """Whether `chunk` may return a shorter last part; set by `auto_padding=True` on construction."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the last row, or of the first if `padding_candidate` is "first"."""
        if padding_size == 0:
            return
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs([*range(len(self)), *[row] * padding_size])
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Split into `chunks` equal parts; with auto padding into parts of ceil(B / chunks) rows, the last one shorter."""
        if chunks < 1:
            raise ValueError(f"chunk: the number of parts must be at least 1, not {chunks}")
        if len(self) % chunks and not self.is_padding_enabled():
            raise ValueError(f"chunk: {len(self)} rows do not divide into {chunks} parts; see pad_dataproto_to_divisor")
        if len(self) == 0:
            return [self.slice() for _ in range(chunks)]
        return self.split(-(-len(self) // chunks))

    def split(self, split_size: int) -> list["DataProto"]:
        """Parts of `split_size` rows; the last may be shorter."""
        if split_size < 1:
            raise ValueError(f"split: split_size must be at least 1, not {split_size}")
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """Concatenate the rows of all parts, which must have the same keys and equal meta_info.

        meta_info["metrics"], a dict or a list of dicts in each part, becomes one dict of lists.
        """
        if not data:
            raise ValueError("concat: no parts")
        meta = concat_meta_info([part.meta_info for part in data])
        if not any(part._columns() for part in data):
            return type(data[0])(None, {}, meta)
        for i, part in enumerate(data):
            if part._columns() != data[0]._columns():
                odd = sorted(part._columns() ^ data[0]._columns())
                raise ValueError(f"concat: part {i} and part 0 do not have the same keys; only one of them has {odd}")
        arrays = {k: np.concatenate([part.non_tensor_batch[k] for part in data]) for k in data[0].non_tensor_batch}
        batches = [part.batch for part in data if part.batch is not None]
        return type(data[0])(concat_tensors(batches) if batches else None, arrays, meta)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row `repeat_times` times: AABB with `interleave`, ABAB without."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> "DataProto":
        """Row i `repeat_times[i]` times."""
        times = np.asarray(repeat_times, dtype=np.int64)
        if times.shape != (len(self),):
            raise ValueError(f"sample_level_repeat: {times.shape} counts for a batch of {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Permute the rows in place: row `indices[i]` becomes row i."""
        rows = row_numbers(indices, len(self))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise ValueError(f"reorder: {rows.tolist()} is not a permutation of {len(self)} rows")
        ordered = self.select_idxs(rows)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> "DataProto":
        """Every row becomes `n_split` rows: columns in `split_keys` are split along dimension 1, the others repeated."""
        split = set(split_keys or ())
        self._require_columns(split, "unfold_column_chunks")
        repeated = self.repeat(n_split, interleave=True)
        tensors = tensors_of(self.batch)

        def unfold(key: str, value: Any, shape: tuple[int, ...]) -> Any:
            if len(shape) < 2 or shape[1] % n_split:
                raise ValueError(
                    f"unfold_column_chunks: {key!r} of shape {shape} cannot be split into {n_split} columns"
                )
            return value.reshape(shape[0] * n_split, shape[1] // n_split, *shape[2:])

        for key in split:
            if repeated.batch is not None and key in tensors:
                repeated.batch[key] = unfold(key, tensors[key], tuple(tensors[key].shape))
            else:
                column = self.non_tensor_batch[key]
                repeated.non_tensor_batch[key] = unfold(key, column, column.shape)
        return repeated

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """Mini-batches of equal size for `epochs` epochs; `dataloader_kwargs={"shuffle": True}` shuffles by `seed`."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"make_iterator: {len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        options = dataloader_kwargs or {}
        generator = (
            torch.Generator()
        )  # own generator: DataLoader draws a seed, which must not advance torch's global RNG
        if seed is not None:
            generator.manual_seed(seed)
        elif options.get("shuffle"):
            generator.manual_seed(int(torch.randint(2**62, ())))
        loader: DataLoader[int] = DataLoader(
            range(len(self)),  # type: ignore[arg-type]  # any sequence of row numbers works
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=generator,
            **options,
        )
        for _ in range(epochs):
            yield from loader

    def to(self, device: torch.device | str) -> "DataProto":
        """Move the tensors to `device`, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def print_size(self, prefix: str = "") -> None:
        """Log the memory use of tensors and arrays."""
        tensors = sum(v.nbytes for v in tensors_of(self.batch).values())
        arrays = sum(v.nbytes for v in self.non_tensor_batch.values())
        logger.info("%s%d rows: tensors %.6f GB, arrays %.6f GB", prefix, len(self), tensors / 2**30, arrays / 2**30)

    def to_state(self) -> dict[str, Any]:
        """The batch as a dict for `utils.state_file`."""
        columns, names = ({}, None) if self.batch is None else stored_columns(self.batch)
        return {
            "batch_size": None if self.batch is None else list(self.batch.batch_size),
            "batch": {k: v.to_state() if isinstance(v, Ragged) else v for k, v in columns.items()},
            "names": names,
            "non_tensor_batch": {k: column_state(v) if k == IMAGES else v for k, v in self.non_tensor_batch.items()},
            "meta_info": self.meta_info,
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> "DataProto":
        """The inverse of `to_state`."""
        columns = {k: Ragged.from_state(v) if isinstance(v, dict) else v for k, v in state["batch"].items()}
        size = state["batch_size"]
        batch = None if size is None else batch_of_stored(columns, state.get("names"), size)
        arrays = {k: column_of_state(v) if k == IMAGES else v for k, v in state["non_tensor_batch"].items()}
        return DataProto(batch, arrays, state["meta_info"])

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to one safetensors file. Objects must be plain data: text, numbers, lists, dicts, tensors, arrays."""
        Path(filepath).write_bytes(to_bytes(self.to_state(), owner="DataProto.save_to_disk"))

    @staticmethod
    def load_from_disk(filepath: str | Path) -> "DataProto":
        """Read a batch written by `save_to_disk`, on the CPU. The file is data: loading runs no code."""
        try:
            return DataProto.from_state(from_bytes(Path(filepath).read_bytes()))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{filepath} is not a DataProto that `save_to_disk` wrote ({error})") from error

    def __getstate__(self) -> dict[str, Any]:
        packed = None
        if self.batch is not None:
            columns, names = stored_columns(self.batch)
            packed = (tuple(self.batch.batch_size), {k: pack_tensor(v) for k, v in columns.items()}, names)
        return {"batch": packed, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state["batch"]
        self.batch = None
        if packed is not None:
            batch_size, columns, names = packed
            self.batch = batch_of_stored({k: unpack_tensor(v) for k, v in columns.items()}, names, batch_size)
        self.non_tensor_batch = state["non_tensor_batch"]
        self.meta_info = state["meta_info"]

    def _columns(self) -> set[str]:
        return {*names_of(self.batch), *self.non_tensor_batch}

    def _with_rows(self, batch: Batch | None, arrays: dict[str, np.ndarray]) -> "DataProto":
        return type(self)(batch, arrays, dict(self.meta_info))

    def _require_columns(self, keys: set[str], operation: str) -> None:
        for key in sorted(keys - self._columns()):
            raise KeyError(f"{operation}: no key {key!r} in the batch, which has {sorted(self._columns())}")

    def _require_keys(
        self, batch_keys: Sequence[str] | None, array_keys: Sequence[str] | None, meta_keys: Sequence[str] | None
    ) -> None:
        for part, wanted, present in (
            ("batch", batch_keys, names_of(self.batch)),
            ("non_tensor_batch", array_keys, list(self.non_tensor_batch)),
            ("meta_info", meta_keys, list(self.meta_info)),
        ):
            for key in wanted or ():
                if key not in present:
                    raise KeyError(f"no key {key!r} in {part}, which has {sorted(present)}")


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Collate rows to a batch. meta_info is the first row's."""
    if not x:
        raise ValueError("collate_fn: no rows")
    tensors: dict[str, torch.Tensor] = {}
    if x[0].batch is not None:
        rows = [item.batch for item in x if item.batch is not None]
        tensors = {k: torch.stack([row[k] for row in rows]) for k in tensors_of(rows[0])}
    arrays = {k: object_array(item.non_tensor_batch[k] for item in x) for k in x[0].non_tensor_batch}
    return DataProto.from_dict(tensors, arrays, x[0].meta_info)


def _subset(part: dict[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    return dict(part) if keys is None else {k: part[k] for k in keys}
