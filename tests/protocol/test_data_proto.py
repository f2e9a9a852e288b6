"""Batch operations on hand-computed cases, and their errors."""

import logging
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lockstep.protocol import DataProto, DataProtoItem, collate_fn, object_array, union_numpy_dict, union_tensor_dict
from lockstep.protocol.columns import deep_equal


def make(rows: int = 4, start: int = 0) -> DataProto:
    ids = torch.arange(start, start + rows)
    return DataProto.from_dict(
        tensors={"ids": ids, "obs": torch.stack([ids * 10.0, ids * 10.0 + 1], dim=1)},
        non_tensors={"uid": np.array([f"u{i}" for i in ids.tolist()], dtype=object)},
        meta_info={"temperature": 0.7},
    )


def ids(data: DataProto) -> list[int]:
    """The ids, after checking that every other column belongs to the same rows."""
    assert data.batch is not None
    numbers = data.batch["ids"].tolist()
    assert data.batch["obs"].tolist() == [[i * 10.0, i * 10.0 + 1] for i in numbers]
    assert data.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in numbers]
    return numbers


def objects_only(rows: int = 4) -> DataProto:
    return DataProto.from_dict(non_tensors={"uid": [f"u{i}" for i in range(rows)]}, meta_info={"q": 1})


def uids(data: DataProto) -> list[str]:
    assert data.batch is None
    return data.non_tensor_batch["uid"].tolist()


def test_lists_become_one_object_per_row() -> None:
    data = DataProto.from_dict(non_tensors={"raw_prompt_ids": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["raw_prompt_ids"].shape == (2,)
    assert data[1].non_tensor_batch["raw_prompt_ids"] == [3, 4]


def test_from_single_dict_sorts_by_type() -> None:
    data = DataProto.from_single_dict({"x": torch.zeros(2, 3), "uid": np.array(["a", "b"], dtype=object)}, {"k": 1})
    assert data.batch is not None and list(data.batch.keys()) == ["x"]
    assert list(data.non_tensor_batch) == ["uid"] and data.meta_info == {"k": 1}
    with pytest.raises(ValueError, match="key 'y' is a list"):
        DataProto.from_single_dict({"y": [1, 2]})  # type: ignore[dict-item]


def test_length_mismatch_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"batch key 'b' has batch size \(3,\), 'a' has \(2,\)"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="non-tensor key 'uid' has shape"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"uid": ["x", "y", "z"]})
    with pytest.raises(ValueError, match="non-tensor key 'uid' is a list"):
        DataProto(non_tensor_batch={"uid": ["x"]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="num_batch_dims=2 is for tensors only"):
        DataProto.from_dict({"a": torch.zeros(2, 3)}, {"uid": ["x", "y"]}, num_batch_dims=2)


def test_tensordict_round_trip() -> None:
    data = make()
    flat = data.to_tensordict()
    assert isinstance(flat, TensorDict) and flat.batch_size == torch.Size([4])
    assert data.batch is not None and "uid" not in data.batch.keys()  # noqa: SIM118
    data.meta_info |= {"metrics": {"loss": [1.0]}, "eos": [1, 2], "none": None}
    back = DataProto.from_tensordict(data.to_tensordict()[1:3], meta_info={"temperature": 0.5})
    assert ids(back) == [1, 2]
    assert back.meta_info == {"temperature": 0.5, "metrics": {"loss": [1.0]}, "eos": [1, 2], "none": None}
    with pytest.raises(ValueError, match="'uid' is both a column and a meta_info key"):
        DataProto.from_dict(non_tensors={"uid": ["a"]}, meta_info={"uid": 1}).to_tensordict()
    assert len(DataProto.from_tensordict()) == 0
    assert uids(DataProto.from_tensordict(objects_only().to_tensordict())) == ["u0", "u1", "u2", "u3"]


def test_nested_tensors_are_split_and_joined() -> None:
    rows = [torch.arange(n) for n in (2, 3, 1, 4)]
    data = DataProto.from_dict({"ids": torch.nested.nested_tensor(rows, layout=torch.jagged)})
    parts = data.chunk(2)
    assert [row.tolist() for row in parts[1].tensors["ids"].unbind()] == [[0], [0, 1, 2, 3]]
    joined = DataProto.concat(parts).tensors["ids"]
    assert joined.layout is torch.jagged and [row.tolist() for row in joined.unbind()] == [row.tolist() for row in rows]


def test_indexing() -> None:
    data = make()
    row = data[2]
    assert isinstance(row, DataProtoItem) and row.batch is not None
    assert row.batch["ids"].item() == 2 and row.non_tensor_batch == {"uid": "u2"}
    assert data[np.int64(-1)].non_tensor_batch == {"uid": "u3"}
    assert ids(data[1:3]) == [1, 2] and ids(data[::2]) == [0, 2]
    assert ids(data[[3, 3, 0]]) == [3, 3, 0] and ids(data[torch.tensor([1])]) == [1]
    assert ids(data[np.array([True, False, False, True])]) == [0, 3]
    assert ids(data[torch.tensor([False, True, False, False])]) == [1]
    assert ids(data[[True, False, True, False]]) == [0, 2] and ids(data[[]]) == []
    with pytest.raises(IndexError, match="row 4 is out of range"):
        data[4]
    with pytest.raises(IndexError, match="row 9 is out of range"):
        data[[0, 9]]
    with pytest.raises(ValueError, match=r"mask has shape \(2,\), but the batch has 4 rows"):
        data[[True, False]]
    with pytest.raises(ValueError, match="select rows with a list of ints or a mask"):
        data.select_idxs([0.5])  # type: ignore[list-item]


def test_select_pop_rename() -> None:
    data = make()
    part = data.select(batch_keys=["ids"], non_tensor_batch_keys=[], meta_info_keys=[])
    assert part.batch is not None and list(part.batch.keys()) == ["ids"]
    assert part.non_tensor_batch == {} and part.meta_info == {}

    copied = data.select(deepcopy=True)
    assert copied.batch is not None and data.batch is not None
    copied.batch["ids"][0] = 99
    assert ids(data) == [0, 1, 2, 3]

    taken = data.pop(["obs"], ["uid"], ["temperature"])
    assert taken.batch is not None and list(taken.batch.keys()) == ["obs"] and len(taken) == 4
    assert taken.meta_info == {"temperature": 0.7}
    assert list(data.batch.keys()) == ["ids"] and data.non_tensor_batch == {} and data.meta_info == {}

    swapped = make().rename(["ids", "obs", "uid"], ["obs", "ids", "name"])
    assert swapped.batch is not None and swapped.batch["obs"].tolist() == [0, 1, 2, 3]
    assert swapped.non_tensor_batch["name"][0] == "u0"


def test_missing_keys_are_rejected_and_nothing_is_removed() -> None:
    data = make()
    with pytest.raises(KeyError, match="no key 'nope' in batch, which has"):
        data.select(batch_keys=["nope"])
    with pytest.raises(KeyError, match="no key 'nope' in non_tensor_batch"):
        data.pop(["ids"], ["nope"])
    with pytest.raises(KeyError, match="no key 'nope' in meta_info"):
        data.pop(meta_info_keys=["nope"])
    with pytest.raises(KeyError, match="rename: no key 'nope'"):
        data.rename("nope", "x")
    with pytest.raises(ValueError, match="'ids' cannot become 'obs'"):
        data.rename("ids", "obs")
    with pytest.raises(ValueError, match="one new name per old name"):
        data.rename(["ids", "obs"], "x")
    with pytest.raises(KeyError, match="no key 'ids' in batch"):
        objects_only().select(batch_keys=["ids"])
    assert ids(data) == [0, 1, 2, 3]


def test_union_adds_keys_and_keeps_equal_ones() -> None:
    data = make()
    other = DataProto.from_dict(
        {"ids": torch.arange(4), "new": torch.tensor([1.0, float("nan"), 3.0, 4.0])},
        {"uid": ["u0", "u1", "u2", "u3"], "score": [1.0, float("nan"), {"a": np.ones(2)}, None]},
        {"temperature": 0.7, "step": 3},
    )
    assert data.union(other) is data
    assert data.batch is not None and set(data.batch.keys()) == {"ids", "obs", "new"}
    assert set(data.non_tensor_batch) == {"uid", "score"} and data.meta_info == {"temperature": 0.7, "step": 3}
    data.union(pickle.loads(pickle.dumps(other)))  # equal by value, NaN included


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto.from_dict({"ids": torch.tensor([0, 1, 2, 9])}), "batch key 'ids' has different values"),
        (DataProto.from_dict({"ids": torch.arange(4.0)}), "batch key 'ids' has different values"),
        (
            DataProto.from_dict(non_tensors={"uid": ["u0", "u1", "u2", "x"]}),
            "non-tensor key 'uid' has different values",
        ),
        (DataProto(meta_info={"temperature": 1.0}), "meta_info key 'temperature' has different values"),
        (DataProto.from_dict({"new": torch.zeros(3)}), "union: 4 rows of .* and 3 rows of"),
    ],
)
def test_union_conflicts_name_the_key_and_change_nothing(other: DataProto, message: str) -> None:
    data = make()
    with pytest.raises(ValueError, match=message):
        data.union(other)
    assert ids(data) == [0, 1, 2, 3] and data.meta_info == {"temperature": 0.7}


def test_union_with_missing_parts() -> None:
    assert ids(DataProto().union(make())) == [0, 1, 2, 3]
    assert ids(make().union(DataProto(meta_info={"k": 1}))) == [0, 1, 2, 3]
    both = objects_only().union(DataProto.from_dict({"ids": torch.arange(4)}))
    assert both.batch is not None and len(both) == 4


def test_union_functions() -> None:
    one, two = TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"b": torch.ones(2)}, [2])
    assert union_tensor_dict(one, two)["b"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\) rows"):
        union_tensor_dict(one, TensorDict({"c": torch.ones(3)}, [3]))
    arrays = union_numpy_dict({"a": np.zeros(2)}, {"a": np.zeros(2), "b": object_array([1, 2])})
    assert set(arrays) == {"a", "b"}


def test_chunk_and_split() -> None:
    data = make()
    assert [ids(part) for part in data.chunk(2)] == [[0, 1], [2, 3]]
    assert [ids(part) for part in data.split(3)] == [[0, 1, 2], [3]]
    with pytest.raises(ValueError, match="chunk: 4 rows do not divide into 3 parts"):
        data.chunk(3)
    with pytest.raises(ValueError, match="split_size must be at least 1"):
        data.split(0)
    padded = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    assert padded.is_padding_enabled() and not data.is_padding_enabled()
    assert [len(part) for part in padded.chunk(2)] == [3, 2]
    assert [part.meta_info for part in DataProto(meta_info={"k": 1}).chunk(2)] == [{"k": 1}, {"k": 1}]


def test_parts_have_their_own_meta_info() -> None:
    data = make()
    data.chunk(2)[0].meta_info["mine"] = 1
    assert data.meta_info == {"temperature": 0.7}


def test_concat() -> None:
    assert ids(DataProto.concat([make(2), make(3, start=2)])) == [0, 1, 2, 3, 4]
    assert uids(DataProto.concat([objects_only(1), objects_only(2)])) == ["u0", "u0", "u1"]
    merged = DataProto.concat(
        [
            DataProto(meta_info={"metrics": {"loss": 1.0}, "a": 1}),
            DataProto(meta_info={"metrics": [{"loss": 2.0}, {"loss": 3.0, "kl": 0.1}], "b": 2}),
        ]
    )
    assert merged.meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0], "kl": [0.1]}, "a": 1, "b": 2}


def test_concat_conflicts() -> None:
    wide = make()
    assert wide.batch is not None
    wide.batch["obs"] = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"batch key 'obs' has shape \(4, 2\) in part 0 and \(4, 3\) in part 1"):
        DataProto.concat([make(), wide])
    with pytest.raises(
        ValueError, match=r"part 1 and part 0 do not have the same keys; only one of them has \['obs'\]"
    ):
        DataProto.concat([make(), make().select(batch_keys=["ids"])])
    with pytest.raises(ValueError, match=r"meta_info key 'temperature' is 0.7 in one part and 1.0 in another"):
        DataProto.concat([make(), DataProto(make().batch, make().non_tensor_batch, {"temperature": 1.0})])
    with pytest.raises(ValueError, match="concat: no parts"):
        DataProto.concat([])


def test_repeat_and_reorder() -> None:
    assert ids(make(2).repeat(2)) == [0, 0, 1, 1]
    assert ids(make(2).repeat(2, interleave=False)) == [0, 1, 0, 1]
    assert ids(make(3).sample_level_repeat([2, 0, 1])) == [0, 0, 2]
    assert ids(make(2).sample_level_repeat(torch.tensor([1, 2]))) == [0, 1, 1]
    with pytest.raises(ValueError, match=r"\(1,\) counts for a batch of 2 rows"):
        make(2).sample_level_repeat([1])
    data = make()
    data.reorder(torch.tensor([2, 0, 3, 1]))
    assert ids(data) == [2, 0, 3, 1]
    with pytest.raises(ValueError, match="not a permutation of 4 rows"):
        data.reorder([0, 0, 1, 2])


def test_batches_without_tensors() -> None:
    data = objects_only()
    assert len(data) == 4 and data[1].batch is None
    assert uids(data[1:3]) == ["u1", "u2"] and uids(data[[3, 0]]) == ["u3", "u0"]
    assert [uids(part) for part in data.chunk(2)] == [["u0", "u1"], ["u2", "u3"]]
    assert uids(data.repeat(2)[:3]) == ["u0", "u0", "u1"]
    assert [uids(part) for part in data.make_iterator(2, 1)] == [["u0", "u1"], ["u2", "u3"]]
    assert uids(data.pop(non_tensor_batch_keys=["uid"])) == ["u0", "u1", "u2", "u3"] and len(data) == 0
    data = objects_only(2)
    data.padding(1)
    data.reorder([2, 1, 0])
    assert uids(data.to("cpu")) == ["u1", "u1", "u0"]
    assert uids(pickle.loads(pickle.dumps(data))) == ["u1", "u1", "u0"]
    assert uids(collate_fn([data[0], data[2]])) == ["u1", "u0"]


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict({"x": torch.arange(8).reshape(2, 4), "y": torch.tensor([7, 8])}, {"uid": ["a", "b"]})
    out = data.unfold_column_chunks(2, ["x"])
    assert out.batch is not None and out.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert out.batch["y"].tolist() == [7, 7, 8, 8] and out.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match=r"'x' of shape \(2, 4\) cannot be split into 3"):
        data.unfold_column_chunks(3, ["x"])
    with pytest.raises(KeyError, match="no key 'z'"):
        data.unfold_column_chunks(2, ["z"])


def test_make_iterator_shuffles_by_seed() -> None:
    def order(seed: int) -> list[list[int]]:
        return [ids(part) for part in make(6).make_iterator(2, 2, seed, {"shuffle": True})]

    assert order(5) == order(5) != order(6)
    for epoch in (order(5)[:3], order(5)[3:]):
        assert sorted(i for part in epoch for i in part) == [0, 1, 2, 3, 4, 5]
    assert order(5)[:3] != order(5)[3:]
    with pytest.raises(ValueError, match="6 rows do not divide into mini-batches of 4"):
        next(make(6).make_iterator(4, 1))


def test_make_iterator_draws_from_torch_only_to_shuffle_without_a_seed() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(make(4).make_iterator(2, 1))
    list(make(4).make_iterator(2, 1, 5, {"shuffle": True}))
    assert torch.equal(torch.get_rng_state(), before)
    first = [ids(part) for part in make(8).make_iterator(8, 1, None, {"shuffle": True})]
    torch.manual_seed(3)
    assert [ids(part) for part in make(8).make_iterator(8, 1, None, {"shuffle": True})] == first


def test_collate_rows() -> None:
    data = make()
    back = collate_fn([data[i] for i in (3, 1)])
    assert ids(back) == [3, 1] and back.meta_info == data.meta_info
    with pytest.raises(ValueError, match="no rows"):
        collate_fn([])


def test_save_and_load(tmp_path) -> None:
    data = make()
    assert data.batch is not None
    data.batch["half"] = torch.tensor([1.5, -2.0, 3.0, 0.0], dtype=torch.bfloat16)
    data.batch["flag"] = torch.tensor([True, False, True, True])
    data.batch["none"] = torch.zeros(4, 0)
    data.non_tensor_batch["messages"] = object_array([[{"role": "user", "content": "ü\ud83d"}], None, 1.5, ("a", 2)])
    data.non_tensor_batch["score"] = np.array([0.5, 1.0, float("nan"), 2.0], dtype=np.float32)
    data.meta_info["nested"] = {"temperature": 0.7, "ids": torch.arange(3)}
    data.save_to_disk(tmp_path / "batch")
    back = DataProto.load_from_disk(str(tmp_path / "batch"))
    assert ids(back) == [0, 1, 2, 3] and back.batch is not None
    for key in data.batch.keys():  # noqa: SIM118
        assert torch.equal(back.batch[key], data.batch[key]) and back.batch[key].dtype == data.batch[key].dtype
    assert back.non_tensor_batch.keys() == data.non_tensor_batch.keys()
    for name, values in data.non_tensor_batch.items():
        assert deep_equal(back.non_tensor_batch[name], values) and back.non_tensor_batch[name].dtype == values.dtype
    assert deep_equal(back.meta_info, data.meta_info)
    back.batch["ids"] += 1  # writable memory
    DataProto().save_to_disk(tmp_path / "empty")
    assert len(DataProto.load_from_disk(tmp_path / "empty")) == 0
    (tmp_path / "other").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="other is not a DataProto that `save_to_disk` wrote"):
        DataProto.load_from_disk(tmp_path / "other")


def test_shard_is_pickled_without_the_rest_of_its_batch() -> None:
    data = DataProto.from_dict({"x": torch.zeros(64, 1024)})
    assert len(pickle.dumps(data.chunk(64)[0])) < 8 * 1024


def test_print_size_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make().print_size("rollout: ")
    assert "rollout: 4 rows: tensors" in caplog.text
