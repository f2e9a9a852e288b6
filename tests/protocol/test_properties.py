"""Properties of batch operations for any size and content."""

import pickle

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from lockstep.protocol import DataProto, drop_marked, pad_and_mark
from lockstep.protocol.columns import deep_equal

quick = settings(max_examples=25, deadline=None)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 1) -> DataProto:
    rows = draw(st.integers(min_rows, 12))
    has_tensors = draw(st.booleans())
    floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
    tensors = {
        "x": torch.tensor(draw(st.lists(floats, min_size=rows, max_size=rows))),
        "ids": torch.arange(rows * 3).reshape(rows, 3),
    }
    objects = st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=3), st.none())
    arrays = {"uid": draw(st.lists(objects, min_size=rows, max_size=rows))}
    return DataProto.from_dict(tensors if has_tensors else None, arrays, {"temperature": 0.5})


def same(a: DataProto, b: DataProto) -> bool:
    tensors = (None if a.batch is None else a.batch.to_dict(), None if b.batch is None else b.batch.to_dict())
    return deep_equal(*tensors) and deep_equal(a.non_tensor_batch, b.non_tensor_batch) and a.meta_info == b.meta_info


@quick
@given(batches(), st.integers(1, 12))
def test_concat_undoes_split_and_chunk(data: DataProto, n: int) -> None:
    assert same(DataProto.concat(data.split(n)), data)
    if len(data) % n == 0:
        parts = data.chunk(n)
        assert len(parts) == n and {len(part) for part in parts} == {len(data) // n}
        assert same(DataProto.concat(parts), data)


@quick
@given(batches(), st.integers(1, 4))
def test_repeat(data: DataProto, k: int) -> None:
    interleaved, tiled = data.repeat(k), data.repeat(k, interleave=False)
    for row in range(len(data)):
        for copy in range(k):
            assert same(interleaved[[row * k + copy]], data[[row]])
            assert same(tiled[[copy * len(data) + row]], data[[row]])
    assert same(data.sample_level_repeat([k] * len(data)), interleaved)


@quick
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_and_its_inverse(data: DataProto, random) -> None:
    order = list(range(len(data)))
    random.shuffle(order)
    moved = data.select()
    moved.reorder(order)
    assert all(same(moved[[i]], data[[row]]) for i, row in enumerate(order))
    moved.reorder(np.argsort(order))
    assert same(moved, data)


@quick
@given(batches())
def test_union_of_selected_parts_is_the_whole(data: DataProto) -> None:
    left = data.select(batch_keys=[], non_tensor_batch_keys=["uid"])
    assert same(left.union(data), data)
    assert same(data.select().union(data), data)


@quick
@given(batches(), st.integers(1, 8))
def test_marked_padding_is_dropped_after_a_split(data: DataProto, n: int) -> None:
    padded = pad_and_mark(data, n)
    assert len(padded) % n == 0 and len(padded) - len(data) < n
    assert same(drop_marked(DataProto.concat(padded.chunk(n))), data)


@quick
@given(batches())
def test_pickling_keeps_everything(data: DataProto) -> None:
    assert same(pickle.loads(pickle.dumps(data)), data)
