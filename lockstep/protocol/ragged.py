"""Rows without padding: a batch whose columns hold real tokens only, at rest and when it is sent.

    prompts    [5 6 7] [8 9]       ┐                                  ┌ . 5 6 7   padded, when batch["prompts"] is read
    responses  [1 2] [3 4 1]       ┘ values of all rows, and lengths  └ . . 8 9

`protocol.keys` says how each column is stored. What can be derived (`input_ids`, `attention_mask`, `position_ids`) is not stored.

A column that is read by name becomes a padded tensor and stays one, so that a change in place is not lost, until `pack` makes it
ragged again. Stages whose cost must not depend on the padded width read a batch by `protocol/tokens.py`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeGuard, cast, final

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.protocol.keys import BATCH_KEYS, DERIVED, MASKED, SOURCES


@dataclass(frozen=True)
class Ragged:
    """A column whose rows differ in size.

    values:  (N, …) the entries of all rows, one row after the other.
    lengths: (B,) entries of each row.
    width:   entries of a padded row.
    fill:    what a padded row is filled up with, on the left or on the right.
    dtype:   of the padded tensor.
    """

    values: Tensor
    lengths: Tensor
    width: int
    fill: float
    dtype: torch.dtype
    left: bool = False

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Sequence[Any]],
        width: int,
        fill: float,
        dtype: torch.dtype,
        stored: torch.dtype,
        *,
        left: bool = False,
    ) -> "Ragged":
        """A row that is longer than `width` is an error."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if len(rows) and int(lengths.max()) > width:
            raise ValueError(f"a row has {int(lengths.max())} tokens, more than the {width} of a padded row")
        numpy_dtype = torch.empty(0, dtype=stored).numpy().dtype
        flat = np.fromiter(chain.from_iterable(rows), numpy_dtype, count=int(lengths.sum()))
        return cls(torch.from_numpy(flat), lengths, width, fill, dtype, left)

    @classmethod
    def of_padded(
        cls, padded: Tensor, lengths: Tensor, stored: torch.dtype | None = None, *, fill: float = 0, left: bool = False
    ) -> "Ragged":
        """The first `lengths` entries of each row, or with `left` the last. stored: dtype of the values, by default the same."""
        values = torch.empty((int(lengths.sum()), *padded.shape[2:]), dtype=stored or padded.dtype)
        ragged = cls(values, lengths, padded.shape[1], fill, padded.dtype, left)
        rows = _array(padded)
        for row, (entries, places) in enumerate(ragged._rows_and_places()):
            entries[:] = rows[row, places]
        return ragged

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.lengths), self.width, *self.values.shape[1:]])

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self) -> Tensor:
        out = torch.full(tuple(self.shape), self.fill, dtype=self.dtype)
        rows = _array(out)
        for row, (entries, places) in enumerate(self._rows_and_places()):
            rows[row, places] = entries
        return out

    def _rows_and_places(self) -> Iterator[tuple[np.ndarray, slice]]:
        """The entries of each row, as a view, and their places in a padded row."""
        values = _array(self.values)
        for start, end in pairwise(self._starts):
            length = end - start
            yield values[start:end], slice(self.width - length, self.width) if self.left else slice(length)

    @cached_property
    def _starts(self) -> list[int]:
        """Where each row begins in `values`, and where the last one ends."""
        return [0, *self.lengths.cumsum(0).tolist()]

    def row(self, number: int) -> Tensor:
        """The entries of a row, as a view."""
        return self.values[self._starts[number] : self._starts[number + 1]]

    def rows(self) -> list[Tensor]:
        return [self.row(number) for number in range(len(self))]

    def take(self, rows: slice | Sequence[int], limits: Sequence[float] | None = None) -> "Ragged":
        """These rows; a slice shares memory. limits: at most this many entries of each row, from its start."""
        if isinstance(rows, slice) and rows.step in (None, 1) and limits is None:
            start, stop, _ = rows.indices(len(self))
            values = self.values[self._starts[start] : self._starts[max(start, stop)]]
            return replace(self, values=values, lengths=self.lengths[rows])
        numbers = [*range(len(self))[rows]] if isinstance(rows, slice) else rows
        lengths = self.lengths[torch.tensor(numbers, dtype=torch.int64)]
        if limits is not None:
            lengths = torch.tensor([min(n, limit) for n, limit in zip(lengths.tolist(), limits, strict=True)])
        array = _array(self.values)
        starts = (self._starts[number] for number in numbers)
        parts = [array[start : start + length] for start, length in zip(starts, lengths.tolist())]
        taken = torch.from_numpy(np.concatenate(parts)).view(self.values.dtype) if parts else self.values[:0]
        return replace(self, values=taken, lengths=lengths)

    def to_state(self) -> dict[str, Any]:
        """As a dict for `utils.state_file`."""
        fields = {field: getattr(self, field) for field in ("values", "lengths", "width", "fill", "left")}
        return fields | {"dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Ragged":
        return cls(**state | {"dtype": getattr(torch, state["dtype"])})

    def is_like(self, other: "Ragged") -> bool:
        """Whether rows of the other may follow these."""
        mine, theirs = ((x.shape[1:], x.fill, x.dtype, x.left, x.values.dtype) for x in (self, other))
        return mine == theirs

    def with_entries_like(self, other: "Ragged") -> "Ragged":
        """This column or, if its entries have no size, one filled with entries of the other's size."""
        if self.values.shape[1:].numel() or not other.values.shape[1:].numel():
            return self
        shape = (len(self.values), *other.values.shape[1:])
        return replace(self, values=torch.full(shape, self.fill, dtype=other.values.dtype))

    def equals(self, other: "Ragged") -> bool:
        """NaN equals NaN."""
        if not (self.is_like(other) and torch.equal(self.lengths, other.lengths)):
            return False
        return bool(
            ((self.values == other.values) | ((self.values != self.values) & (other.values != other.values))).all()
        )


def _array(tensor: Tensor) -> np.ndarray:
    """A view of the tensor; numpy has no bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


Column = Tensor | Ragged


def is_entry(lengths: Tensor, width: int, *, left: bool = False) -> Tensor:
    """(B, width) True at the entries of each row, False at padding."""
    place = torch.arange(width)
    return place >= width - lengths[:, None] if left else place < lengths[:, None]


@final
class RaggedBatch:
    """The columns of a batch, with the methods of a TensorDict that this project and programs of verl use.

    Other methods of TensorDict are those of a padded copy; methods that would change the copy alone are refused.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        names: Iterable[str] | None = None,
        padded: Mapping[str, Tensor] | None = None,
        num_rows: int | None = None,
    ) -> None:
        """columns: as they are stored, and the sources of derived ones.
        names:   the columns that the batch has; by default `columns` and what can be derived from them.
        padded:  columns in padded form, which replace the stored ones at the next `pack`.
        num_rows: of a batch without columns.
        """
        self._columns: dict[str, Column] = dict(columns)
        self._padded: dict[str, Tensor] = dict(padded or {})
        self._num_rows = next(
            (len(column) for column in (*self._columns.values(), *self._padded.values())), num_rows or 0
        )
        if names is None:
            names = [*columns, *(name for name in DERIVED if name not in columns and self._derives)]
        self._names = dict.fromkeys(names)

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([self._num_rows])

    @property
    def device(self) -> None:
        """None, as in a TensorDict without a device: the columns are on the host."""
        return None

    def __len__(self) -> int:
        return self._num_rows

    def keys(self) -> list[str]:
        return list(self._names)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self[name]) for name in self.keys())

    def values(self) -> Iterator[Tensor]:
        return (self[name] for name in self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[TensorDict]:
        return iter(self.to_tensordict())

    # ---- columns

    def __getitem__(self, item: Any) -> Any:
        """A padded column by name, which this batch keeps; rows by number (one: its padded tensors), slice, list, array or mask."""
        if isinstance(item, str):
            padded = self.read(item)
            if padded is not self._columns.get(item):
                self._padded[item] = padded
            return padded
        if isinstance(item, (int, np.integer)):
            return self[[int(item)]].to_tensordict()[0]
        return self.take(item)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._names else default

    def read(self, name: str) -> Tensor:
        """A padded column; the batch does not keep it."""
        self._require(name)
        column = self._padded.get(name, self._columns.get(name))
        if column is None:
            return self._derived(name)
        return column.padded() if isinstance(column, Ragged) else column

    def stored(self, name: str) -> Column | None:
        """A column as it is stored after `pack`; None for a derived one."""
        return self._columns.get(name)

    @property
    def columns(self) -> dict[str, Column]:
        """All columns as they are stored after `pack`, and the sources of derived ones."""
        return dict(self._columns)

    def shape_of(self, name: str) -> tuple[int, ...]:
        self._require(name)
        column = self._padded.get(name, self._columns.get(name))
        return (len(self), self.prompts.width + self.responses.width) if column is None else tuple(column.shape)

    def dtype_of(self, name: str) -> torch.dtype:
        self._require(name)
        column = self._padded.get(name, self._columns.get(name))
        return torch.int64 if column is None else column.dtype

    def __setitem__(self, name: str, value: Column) -> None:
        if len(value) != len(self):
            raise ValueError(f"batch key {name!r} has {len(value)} rows in a batch of {len(self)}")
        self._names[name] = None
        if isinstance(value, Tensor):
            self._padded[name] = value
            return
        self._padded.pop(name, None)
        self._columns[name] = value
        if name in SOURCES:
            for derived in DERIVED:
                self._columns.pop(derived, None)
                self._padded.pop(derived, None)

    set = __setitem__

    def __delitem__(self, name: str) -> None:
        self._require(name)
        del self._names[name]
        self._drop_unused()

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self._names and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def update(self, other: "Mapping[str, Tensor] | TensorDict | RaggedBatch") -> "RaggedBatch":
        if not is_ragged(other):
            for name in map(str, other.keys()):
                self[name] = other[name]
            return self
        columns = other.pack().columns
        for name in other._names:
            if name in columns:
                self[name] = columns[name]
            elif all(self._columns.get(source, columns[source]) is columns[source] for source in SOURCES):
                self._columns |= {source: columns[source] for source in SOURCES}
                self._names[name] = None
            else:
                self[name] = other.read(name)
        return self

    def select(self, *names: str) -> "RaggedBatch":
        for name in names:
            self._require(name)
        chosen = RaggedBatch(self._columns, names, self._padded, len(self))
        chosen._drop_unused()
        return chosen

    def exclude(self, *names: str) -> "RaggedBatch":
        return self.select(*(name for name in self._names if name not in names))

    def renamed(self, table: Mapping[str, str]) -> "RaggedBatch":
        """The batch with columns renamed; those are padded."""
        kept = self.exclude(*table)
        moved = {new: self.read(old) for old, new in table.items()}
        names = [table.get(name, name) for name in self._names]
        return RaggedBatch(kept._columns, names, kept._padded | moved, len(self))

    def copy(self) -> "RaggedBatch":
        """Another batch with the same columns, not copied."""
        return RaggedBatch(self._columns, self._names, self._padded, len(self))

    def clone(self) -> "RaggedBatch":
        columns = {
            name: replace(column, values=column.values.clone(), lengths=column.lengths.clone())
            if isinstance(column, Ragged)
            else column.clone()
            for name, column in self._columns.items()
        }
        padded = {name: column.clone() for name, column in self._padded.items()}
        return RaggedBatch(columns, self._names, padded, len(self))

    def _require(self, name: str) -> None:
        if name not in self._names:
            raise KeyError(f"no key {name!r} in the batch, which has {sorted(self._names)}")

    def _drop_unused(self) -> None:
        """Drop what is neither a column of the batch nor the source of one."""
        self._padded = {name: column for name, column in self._padded.items() if name in self._names}
        present = self._padded.keys() | self._columns.keys()
        needed = self._names.keys() if self._names.keys() <= present else {*self._names, *SOURCES}
        self._columns = {name: column for name, column in self._columns.items() if name in needed}

    # ---- rows

    def take(self, rows: Any) -> "RaggedBatch":
        """Rows by slice, numbers or mask; a slice shares memory."""
        index: Any = rows
        if not isinstance(rows, slice):
            index = torch.from_numpy(row_numbers(rows, len(self)) % max(1, len(self)))
            rows = index.tolist()
        taken = {id(v): v.take(rows) if isinstance(v, Ragged) else v[index] for v in self._columns.values()}
        columns = {k: taken[id(v)] for k, v in self._columns.items()}  # two names may share a column
        num_rows = len(range(len(self))[rows]) if isinstance(rows, slice) else len(rows)
        return RaggedBatch(columns, self._names, {k: v[index] for k, v in self._padded.items()}, num_rows)

    def take_or_clear(self, rows: Sequence[int], cleared: Sequence[bool]) -> "RaggedBatch":
        """These rows; those that are cleared have one token and an empty response mask. For a batch with `tokens`."""
        columns: dict[str, Column] = {}
        for name, column in self._columns.items():
            if not isinstance(column, Ragged):
                columns[name] = column[torch.tensor(rows, dtype=torch.int64)]
                continue
            limits = [math.inf] * len(rows)
            for place in (place for place, clear in enumerate(cleared) if clear):
                # the token is the prompt's first one, or after an empty prompt the response's
                limits[place] = int(name != "responses" or not int(self.prompts.lengths[rows[place]]))
            columns[name] = column.take(rows, limits)
        mask = columns["response_mask"]
        assert isinstance(mask, Ragged)
        is_cleared = torch.tensor(list(cleared)).repeat_interleave(mask.lengths)
        columns["response_mask"] = replace(mask, values=mask.values & ~is_cleared)
        return RaggedBatch(columns, self._names)

    @staticmethod
    def concat(parts: "Sequence[RaggedBatch | TensorDict]") -> "RaggedBatch":
        """All rows of the parts, which have the same columns. ValueError for a column whose padded rows differ in shape."""
        batches = [part.pack() if is_ragged(part) else RaggedBatch({**part}) for part in parts]
        names = batches[0]._names
        columns: dict[str, Column] = {}
        for name in dict.fromkeys((*SOURCES, *names)):
            found = [batch.stored(name) for batch in batches]
            ragged = [column for column in found if isinstance(column, Ragged)]
            if ragged:
                largest = max(ragged, key=lambda column: column.values.shape[1:].numel())
                ragged = [column.with_entries_like(largest) for column in ragged]
            if len(ragged) == len(batches) and all(ragged[0].is_like(column) for column in ragged):
                values = torch.cat([column.values for column in ragged])
                lengths = torch.cat([column.lengths for column in ragged])
                columns[name] = replace(ragged[0], values=values, lengths=lengths)
                continue
            if name not in names:
                continue
            if name in DERIVED and all(column is None for column in found) and all(part in columns for part in SOURCES):
                continue
            shapes = [batch.shape_of(name) for batch in batches]
            for i, shape in enumerate(shapes):
                if shape[1:] != shapes[0][1:]:
                    raise ValueError(
                        f"concat: batch key {name!r} has shape {shapes[0]} in part 0 and {shape} in part {i}"
                    )
            columns[name] = torch.cat([batch.read(name) for batch in batches])
        return RaggedBatch(columns, names, num_rows=sum(map(len, batches)))

    # ---- tokens

    @property
    def prompts(self) -> Ragged:
        return cast(Ragged, self._columns["prompts"])

    @property
    def responses(self) -> Ragged:
        return cast(Ragged, self._columns["responses"])

    def tokens(self) -> tuple[Ragged, Ragged] | None:
        """Prompts and responses as they are after `pack`; None if they, or what is derived from them, were changed."""
        self.pack()
        is_changed = not self._derives or any(name in self._columns for name in DERIVED)
        return None if is_changed else (self.prompts, self.responses)

    @property
    def _derives(self) -> bool:
        return all(isinstance(self._columns.get(name), Ragged) for name in SOURCES)

    def _derived(self, name: str) -> Tensor:
        prompts, responses = self.prompts, self.responses
        if name == "input_ids":
            return torch.cat([prompts.padded(), responses.padded()], 1)
        masks = (is_entry(part.lengths, part.width, left=part.left) for part in (prompts, responses))
        mask = torch.cat(list(masks), 1).long()
        return mask if name == "attention_mask" else (mask.cumsum(1) - 1).clamp_min(0)

    def pack(self) -> "RaggedBatch":
        """This batch, with every column stored as `protocol.keys` says. Entries at padding are dropped, and read as the fill."""
        if not self._padded:
            return self
        tokens = {name: self._packed_tokens(name) for name in SOURCES if name in self._padded}
        if not all(isinstance(column, Ragged) for column in tokens.values()):  # changed: nothing is derived any more
            for name in (*DERIVED, *SOURCES):
                if name in self._names:
                    self._padded[name] = self.read(name)
                self._columns.pop(name, None)
        else:
            for name, column in tokens.items():
                self._columns[name] = column
                del self._padded[name]
        padded, self._padded = self._padded, {}
        done: dict[tuple[int, str], Column | None] = {}
        for name, column in padded.items():
            alike = id(column), BATCH_KEYS[name].shape if name in BATCH_KEYS and name not in DERIVED else name
            if alike not in done:  # else two names share a column
                done[alike] = self._packed(name, column)
            if (packed := done[alike]) is None:
                self._columns.pop(name, None)
            else:
                self._columns[name] = packed
        return self

    def _packed_tokens(self, name: str) -> Column:
        padded = self._padded[name]
        source = self._columns.get(name)
        if not isinstance(source, Ragged) or padded.device.type != "cpu":
            return padded
        return source if torch.equal(padded, source.padded()) else padded

    def _packed(self, name: str, padded: Tensor) -> Column | None:
        """None: it is derived."""
        key = BATCH_KEYS.get(name)
        on_host = padded.device.type == "cpu" and not padded.requires_grad
        if key is None or not self._derives or padded.dtype != key.dtype or not on_host:
            return padded
        response = self.responses
        if key.shape == "BT" and padded.shape == (len(self), self.prompts.width + response.width):
            return None if torch.equal(padded, self._derived(name)) else padded
        if key.shape != "BR" or padded.shape != (len(self), response.width):
            return padded
        ragged = Ragged.of_padded(padded, entries_of(response), key.stored, fill=key.fill)
        if name in MASKED or (padded != key.fill).sum() == (ragged.values != key.fill).sum():
            return ragged
        return padded  # it has values at padding, such as a score at the last place of every row

    # ---- as a TensorDict

    def to_tensordict(self) -> TensorDict:
        """The padded columns; this batch does not keep them."""
        return TensorDict({name: self.read(name) for name in self._names}, batch_size=[len(self)])

    def to(self, device: torch.device | str) -> "RaggedBatch | TensorDict":
        return self if torch.device(device).type == "cpu" else self.to_tensordict().to(device)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_") or name.startswith(("_", "set", "pop", "clear", "del", "rename")):
            raise AttributeError(f"a batch without padding has no {name!r}; use `to_tensordict()`")
        return getattr(self.to_tensordict(), name)

    def __repr__(self) -> str:
        return f"RaggedBatch({len(self)} rows of {', '.join(self._names)})"


def row_numbers(idxs: Any, num_rows: int) -> np.ndarray:
    """Row numbers as int64 from a list, array, tensor or range of numbers, or from a mask."""
    rows = idxs.detach().cpu().numpy() if isinstance(idxs, torch.Tensor) else np.asarray(idxs)
    if rows.dtype == bool:
        if rows.shape != (num_rows,):
            raise ValueError(f"mask has shape {rows.shape}, but the batch has {num_rows} rows")
        return np.nonzero(rows)[0]
    if rows.size == 0:
        return np.zeros(0, dtype=np.int64)
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"select rows with a list of ints or a mask, not with {rows.dtype} of shape {rows.shape}")
    for row in rows[(rows < -num_rows) | (rows >= num_rows)]:
        raise IndexError(f"row {row} is out of range for a batch of {num_rows} rows")
    return rows.astype(np.int64)


def entries_of(responses: Ragged) -> Tensor:
    """Entries of each row in the other columns of responses: one per token, and one of an empty response, for its score."""
    return responses.lengths.clamp_min(1)


def is_ragged(batch: object) -> TypeGuard[RaggedBatch]:
    """Whether these tensors of a batch are kept without padding."""
    return isinstance(batch, RaggedBatch)
