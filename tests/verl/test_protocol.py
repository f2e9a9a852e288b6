"""Batches as programs on verl make and convert them: `DataProto` with its exceptions, TensorDicts, nested tensors."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lockstep import protocol
from lockstep.verl import DataProto
from lockstep.verl.protocol import (
    DataProtoConfig,
    adopt,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
    union_numpy_dict,
    union_tensor_dict,
)
from lockstep.verl.utils import tensordict_utils as tu
from lockstep.verl.workers.utils.padding import (
    build_attention_mask_from_nested,
    left_right_2_no_padding,
    no_padding_2_padding,
    response_from_nested,
    response_to_nested,
)


def batch_of(num_rows: int = 6, **meta_info: Any) -> DataProto:
    labels = np.array([f"l{row}" for row in range(num_rows)], dtype=object)
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"labels": labels}, meta_info)


@pytest.mark.parametrize(
    "refused",
    [
        lambda: batch_of().union(DataProto.from_dict({"x": torch.ones(6)})),
        lambda: batch_of().union(batch_of(5)),
        lambda: batch_of(a=1).union(batch_of(a=2)),
        lambda: DataProto.concat([batch_of(a=1), batch_of(a=2)]),
        lambda: batch_of().chunk(5),
        lambda: DataProto.from_dict({"x": torch.ones(4, 2), "y": torch.ones(4, 3)}, num_batch_dims=2),
        lambda: DataProto.from_dict({"x": torch.ones(4, 3)}).unfold_column_chunks(2, split_keys=["x"]),
        lambda: batch_of().make_iterator(mini_batch_size=4, epochs=1),
        lambda: DataProto(None, {"x": ["a"]}),  # type: ignore[dict-item]
        lambda: union_tensor_dict(batch_of().tensors, TensorDict({"x": torch.ones(6)}, [6])),
        lambda: union_numpy_dict({"a": np.ones(2)}, {"a": np.zeros(2)}),
    ],
)
def test_what_does_not_fit_is_an_assertion_error_and_a_value_error(refused: Callable[[], Any]) -> None:
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind):
            refused()


def test_lockstep_raises_value_errors_only() -> None:
    data = protocol.DataProto.from_dict({"x": torch.arange(6)})
    with pytest.raises(ValueError, match="do not divide") as raised:
        data.chunk(5)
    assert not isinstance(raised.value, AssertionError)


def test_batches_of_workers_are_instances_too() -> None:
    class Mine(DataProto):
        pass

    own = protocol.DataProto.from_dict({"x": torch.arange(2)})
    assert isinstance(own, DataProto) and not isinstance(own, Mine) and isinstance(adopt(own), DataProto)
    assert type(adopt(own)) is type(batch_of()[:2]) is type(DataProto.concat([own, own])) is DataProto
    assert type(Mine.from_single_dict({"x": torch.tensor([0])})) is Mine


def test_other_forms_of_constructing_and_joining() -> None:
    assert len(DataProto()) == len(DataProto(None, None, {"a": 1})) == 0  # type: ignore[arg-type]
    data = DataProto(batch={"x": torch.arange(4)})  # type: ignore[arg-type]
    joined = data.union(DataProto.from_dict({"y": torch.ones(4)}), DataProto.from_dict({"z": torch.zeros(4)}))
    assert joined is data and set(data.tensors.keys()) == {"x", "y", "z"}
    assert [part.tensors["x"].tolist() for part in data.split(n_parts=2)] == [[0, 1], [2, 3]]
    assert [len(part) for part in data.split(3)] == [3, 1]
    assert "batch x: (4,)" in data.get_data_info()
    copied = pickle.loads(pickle.dumps(data))
    assert type(copied) is DataProto and copied.tensors["x"].tolist() == [0, 1, 2, 3]


def test_chunks_may_be_uneven_with_auto_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_AUTO_PADDING", raising=False)
    assert not DataProtoConfig.auto_padding
    DataProtoConfig.auto_padding = True
    try:
        assert [len(part) for part in batch_of(5).chunk(2)] == [3, 2]
    finally:
        DataProtoConfig.auto_padding = False
    monkeypatch.setenv("VERL_AUTO_PADDING", "True")
    assert DataProtoConfig.auto_padding and len(batch_of(5).chunk(3)) == 3
    with pytest.raises(AssertionError, match="must be a bool"):
        DataProtoConfig.auto_padding = "yes"  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_are_serialised_and_back() -> None:
    dense = {name: torch.randn(3, 4).to(dtype) for name, dtype in {"f": torch.float32, "b": torch.bfloat16}.items()}
    dense["mask"] = torch.tensor([[True], [False], [True]])
    for tensor in dense.values():
        again = deserialize_single_tensor(serialize_single_tensor(tensor))
        assert again.dtype == tensor.dtype and torch.equal(again, tensor)
    strided = torch.nested.as_nested_tensor([torch.randn(2, 3), torch.randn(1, 3), torch.randn(4, 3)])
    jagged = torch.nested.as_nested_tensor([torch.arange(n) for n in (2, 0, 3)], layout=torch.jagged)
    whole = TensorDict({**dense, "s": strided, "j": jagged}, batch_size=[3], device="cpu")
    size, device, columns = pickle.loads(pickle.dumps(serialize_tensordict(whole)))
    assert size == (3,) and device == "cpu"
    back = deserialize_tensordict((size, device, columns))
    for name in dense:
        assert torch.equal(back[name], whole[name])
    for name in ("s", "j"):
        assert back[name].layout == whole[name].layout
        assert all(map(torch.equal, back[name].unbind(), whole[name].unbind()))


def nested(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(n) + 10 * n for n in lengths], layout=torch.jagged)


def mixed() -> TensorDict:
    columns = {"x": torch.arange(4), "ids": nested(2, 3, 1, 4), "labels": ["a", ["b"], [], {"c": 1}]}
    return tu.get_tensordict(columns, {"name": "run", "top_p": {"train": 1.0}})


def test_tensordicts_of_columns_and_values() -> None:
    data = mixed()
    assert data.batch_size == torch.Size([4]) and data["name"] == "run" and data["labels"] == ["a", ["b"], [], {"c": 1}]
    assert tu.get(data, "labels") == ["a", ["b"], [], {"c": 1}] and tu.get(data, "none", 3) == 3
    assert tu.get_non_tensor_data(data, "top_p", None) == {"train": 1.0}
    assert tu.get_tensordict({}, {"only": 1}).batch_size == torch.Size([])
    tu.assign_non_tensor(data, step=3, scores=[[0.5], [], [1.0], []])
    assert data["step"] == 3 and tu.get(data, "scores") == [[0.5], [], [1.0], []]
    for wrong in ({"x": torch.ones(2), "y": [1, 2, 3]}, {"x": [torch.ones(1)]}, {"x": "text"}):
        with pytest.raises(AssertionError):
            tu.get_tensordict(wrong)
    with pytest.raises(AssertionError, match="both a column and a value"):
        tu.get_tensordict({"x": torch.ones(2)}, {"x": 1})


def test_rows_are_selected_chunked_and_joined() -> None:
    data = mixed()
    picked = tu.index_select_tensor_dict(data, [3, 0])
    assert picked["x"].tolist() == [3, 0] and tu.get(picked, "labels") == [{"c": 1}, "a"]
    assert [row.tolist() for row in picked["ids"].unbind()] == [[40, 41, 42, 43], [20, 21]] and picked["name"] == "run"
    parts = tu.chunk_tensordict(data, 2)
    assert [tu.get(part, "labels") for part in parts] == [["a", ["b"]], [[], {"c": 1}]]
    tu.assert_tensordict_eq(tu.concat_tensordict(parts), data)
    padded, added = tu.pad_to_divisor(data, 3)
    assert (len(padded), added) == (6, 2) and padded["x"].tolist() == [0, 1, 2, 3, 0, 1]
    tu.assert_tensordict_eq(tu.unpad(padded, added), data)
    with pytest.raises(AssertionError, match="do not divide into 3"):
        tu.chunk_tensordict(data, 3)


def test_three_dimensional_positions_stay_ragged_in_the_last() -> None:
    positions = tu.nested_tensor_from_tensor_list([torch.arange(n).expand(3, n) for n in (2, 5, 5)])
    data = tu.get_tensordict({"position_ids": positions})
    picked = tu.index_select_tensor_dict(data, [1, 2])
    assert picked["position_ids"].values().shape == (3, 10)
    assert tu.concat_nested_tensors([positions, positions]).offsets().tolist() == [0, 2, 7, 12, 14, 19, 24]
    tu.maybe_fix_3d_position_ids(data)
    tu.assert_tensordict_eq(tu.contiguous(data), data)


def test_unions_equality_and_iterators() -> None:
    data = mixed()
    assert tu.union_tensor_dict(data, tu.get_tensordict({"y": torch.ones(4)}, {"name": "run"}))["y"].sum() == 4
    for conflict in ({"x": torch.ones(4)}, {"x": torch.arange(3)}):
        with pytest.raises(AssertionError):
            tu.union_tensor_dict(data, tu.get_tensordict(conflict))
    with pytest.raises(AssertionError, match="'name' has different values"):
        tu.union_tensor_dict(data, tu.get_tensordict({"z": torch.ones(4)}, {"name": "other"}))
    other = copy.deepcopy(data)
    tu.assert_tensordict_eq(data, other)
    other["ids"] = nested(2, 3, 1, 5)
    with pytest.raises(AssertionError, match="'ids' differs"):
        tu.assert_tensordict_eq(data, other)
    plain = [b["x"].tolist() for b in tu.make_iterator(data, 2, 2)]
    assert plain == [[0, 1], [2, 3]] * 2
    shuffled = [
        [b["x"].tolist() for b in tu.make_iterator(data, 2, 1, seed=1, dataloader_kwargs={"shuffle": True})]
        for _ in range(2)
    ]
    assert shuffled[0] == shuffled[1] != plain[:2]


def test_keys_are_picked_and_popped() -> None:
    data = mixed()
    kept = tu.get_keys(data, ["x", "name"])
    assert set(kept.keys()) == {"x", "name"} and kept.batch_size == torch.Size([4])
    popped = tu.pop_keys(data, ["labels", "top_p"])
    assert tu.get(popped, "labels") == ["a", ["b"], [], {"c": 1}] and set(data.keys()) == {"x", "ids", "name"}
    assert tu.pop(data, "name") == "run" and tu.pop(data, "name", "none") == "none"
    with pytest.raises(KeyError, match="labels"):
        tu.pop_keys(data, ["labels"])
    rows = [{"ids": torch.arange(n), "n": torch.tensor(n), "text": str(n)} for n in (2, 2)]
    made = tu.list_of_dict_to_tensordict(rows)
    assert made["ids"].is_nested and made["n"].tolist() == [2, 2] and tu.get(made, "text") == ["2", "2"]


def test_padding_is_removed_and_restored() -> None:
    """Values of response tokens come back where they were: the model's value at a place is of the token after it."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])  # three places of prompt, three of response
    ids = torch.arange(12).view(2, 6)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    data = tu.get_tensordict(
        {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 3:], "position_ids": positions}
    )
    data = left_right_2_no_padding(data)
    assert [row.tolist() for row in data["input_ids"].unbind()] == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert [row.tolist() for row in data["position_ids"].unbind()] == [[0, 1, 2, 3]] * 2
    assert (data["max_seq_len"], data["max_response_len"]) == (6, 3) and data["indices"].tolist()[:2] == [1, 2]
    values = data["input_ids"] * 1.0
    assert no_padding_2_padding(values, data).tolist() == [[2.0, 3.0, 0.0], [8.0, 0.0, 0.0]]
    assert no_padding_2_padding(values.values(), data).tolist() == [[2.0, 3.0, 0.0], [8.0, 0.0, 0.0]]
    responses = nested(2, 1)
    assert [row.tolist() for row in response_from_nested(values, responses).unbind()] == [[2.0, 3.0], [8.0]]
    rows = response_to_nested(torch.tensor([[5.0, 6.0, 0.0], [7.0, 0.0, 0.0]]), responses)
    assert [row.tolist() for row in rows.unbind()] == [[5.0, 6.0], [7.0]]
    assert build_attention_mask_from_nested(responses, 3).tolist() == [[1, 1, 0], [1, 0, 0]]
    with pytest.raises(AssertionError, match="attention_mask is missing"):
        left_right_2_no_padding(tu.get_tensordict({"input_ids": ids}))
