"""Padding to a divisor, marks on padding rows, folding, batch futures."""

import pickle

import pytest
import torch

from lockstep.protocol import (
    PADDING_KEY,
    DataProto,
    DataProtoFuture,
    drop_marked,
    fold_batch_dim,
    pad_and_mark,
    pad_dataproto_to_divisor,
    real_rows,
    unfold_batch_dim,
    unpad_dataproto,
)


def make(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [f"u{i}" for i in range(rows)]}, {"k": 1})


def xs(data: DataProto) -> list[int]:
    assert data.batch is not None
    assert data.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in data.batch["x"].tolist()]
    return data.batch["x"].tolist()


def test_pad_to_divisor_repeats_leading_rows() -> None:
    padded, pad_size = pad_dataproto_to_divisor(make(3), 8)
    assert pad_size == 5 and xs(padded) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert xs(unpad_dataproto(padded, pad_size)) == [0, 1, 2]
    data = make(4)
    assert pad_dataproto_to_divisor(data, 2) == (data, 0) and unpad_dataproto(data, 0) is data
    with pytest.raises(ValueError, match="size_divisor must be at least 1"):
        pad_dataproto_to_divisor(data, 0)


def test_marked_rows_are_dropped_wherever_they_are() -> None:
    marked = pad_and_mark(make(3), 4)
    assert real_rows(marked).tolist() == [True, True, True, False]
    marked.reorder([3, 1, 0, 2])
    assert real_rows(marked).tolist() == [False, True, True, True]
    assert xs(drop_marked(marked)) == [1, 0, 2] and PADDING_KEY not in drop_marked(marked).non_tensor_batch


def test_nothing_is_marked_if_it_divides_evenly() -> None:
    data = pad_and_mark(make(4), 2)
    assert PADDING_KEY not in data.non_tensor_batch and drop_marked(data) is data
    assert real_rows(data).tolist() == [True] * 4


def test_padding_twice_keeps_the_first_marks() -> None:
    twice = pad_and_mark(pad_and_mark(make(3), 4), 5)
    assert real_rows(twice).tolist() == [True, True, True, False, False]


def test_fold_and_unfold() -> None:
    folded = fold_batch_dim(make(6), 2)
    assert folded.batch is not None and folded.batch["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(folded) == 2 and folded.non_tensor_batch["uid"].shape == (2, 3)
    assert xs(unfold_batch_dim(folded, batch_dims=2)) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="6 rows do not fold into 4"):
        fold_batch_dim(make(6), 4)


class Ready:
    """A finished future."""

    def __init__(self, value: DataProto) -> None:
        self.value = value

    def get(self) -> DataProto:
        return self.value


def test_future_joins_and_splits_lazily() -> None:
    resolved = 0

    def resolve(futures):
        nonlocal resolved
        resolved += 1
        return [future.get() for future in futures]

    future = DataProtoFuture(DataProto.concat, [Ready(make(2)), Ready(make(4))], resolve=resolve)
    parts = future.chunk(3)
    assert resolved == 0
    assert xs(future.get()) == [0, 1, 0, 1, 2, 3]
    assert [xs(part.get()) for part in parts] == [[0, 1], [0, 1], [2, 3]]
    assert [xs(part.get()) for part in parts[2].chunk(2)] == [[2], [3]]
    assert xs(DataProtoFuture.concat([parts[0], future]).get()) == [0, 1, 0, 1, 0, 1, 2, 3]


def test_future_can_be_pickled() -> None:
    part = pickle.loads(pickle.dumps(DataProtoFuture.concat([Ready(make(4))]).chunk(2)[1]))
    assert xs(part.get()) == [2, 3]
