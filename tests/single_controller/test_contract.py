"""The contract of every single-controller backend, with hand-computed results."""

import re
import traceback

import pytest
import torch
from tensordict import TensorDict

from lockstep.protocol import PADDING_KEY, DataProto, DataProtoFuture
from lockstep.single_controller import LOCAL, Backend, create_colocated_worker_cls
from tests.single_controller.contract import Breaking, Meshed, Scaler, batch, make_group

pytestmark = pytest.mark.first


@pytest.fixture(params=["local", "ray"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return LOCAL if request.param == "local" else request.getfixturevalue("ray_on_shared_processes")


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_workers_know_their_rank(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2, 1])
    assert group.world_size == 3
    assert group.where() == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_one_to_all(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2], 5)
    assert group.set_factor(7, add=1) == [(0, 8), (1, 8)]
    assert group.set_factor.__doc__ == "Set the factor."


def test_all_to_all_and_dp_compute(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    assert group.own_argument(["a", "b"], suffix=["!", "?"]) == ["0:a!", "1:b?"]
    assert group.plus_rank([10, 20]) == [10, 21]
    with pytest.raises(ValueError, match="argument 0 has 3 items for 2 ranks"):
        group.plus_rank([1, 2, 3])
    with pytest.raises(ValueError, match="argument 'suffix' has 1 items for 2 ranks"):
        group.own_argument(["a", "b"], suffix=["!"])
    with pytest.raises(TypeError, match="argument 0 is a int; it must be a list with one item for each of 2 ranks"):
        group.plus_rank(1)


def test_rank_zero(backend: Backend) -> None:
    group = make_group(backend, Scaler, [3])
    assert group.first_only([1, 2]) == (0, [1, 2])
    assert group.first_only_by_execute("a") == (0, "a")
    assert group.execute_func_rank_zero(max, 3, 5) == 5


def test_rows_are_split_and_joined(backend: Backend) -> None:
    out = make_group(backend, Scaler, [2], 3).scale(batch(4))
    assert out.batch["y"].tolist() == [0, 3, 6, 9] and out.batch["rank"].tolist() == [0, 0, 1, 1]
    assert out.meta_info["metrics"] == {"sum": [0 + 1, 2 + 3]}


@pytest.mark.parametrize("rows", [4, 5])
def test_tensordict_is_split_and_joined(backend: Backend, rows: int) -> None:
    out = make_group(backend, Scaler, [2], 3).scale_tensordict(batch(rows, times=2).to_tensordict())
    assert isinstance(out, TensorDict) and out["y"].tolist() == [6 * i for i in range(rows)]
    assert set(out.keys()) == {"y", "metrics"} and out["metrics"] == {"rows": [rows // 2 + rows % 2] * 2}
    with pytest.raises(ValueError, match="no rows to split in argument 0"):
        make_group(backend, Scaler, [2]).scale_tensordict(TensorDict({}, batch_size=[0]))


@pytest.mark.parametrize(("rows", "seen"), [(1, 1), (3, 1), (5, 2), (7, 2)])
def test_uneven_batches_are_padded_and_unpadded(backend: Backend, rows: int, seen: int) -> None:
    group = make_group(backend, Scaler, [4], 2)
    data = batch(rows)
    out = group.scale(data)
    assert out.batch["y"].tolist() == [2 * i for i in range(rows)] and set(out.batch["seen"].tolist()) == {seen}
    assert sum(out.meta_info["metrics"]["sum"]) == sum(range(rows))
    assert PADDING_KEY not in out.non_tensor_batch and PADDING_KEY not in data.non_tensor_batch
    assert group.scale_real_rows(data).batch["y"].tolist() == [2 * i for i in range(rows)]
    whole = group.same_batch(data)
    assert whole.batch["x"].tolist() == list(range(rows)) and list(whole.non_tensor_batch) == ["uid"]
    assert sum(group.metrics_only(data).meta_info["metrics"]["rows"]) == rows
    assert sum(entry["rows"] for entry in group.count(data)) == rows


def test_padding_is_rejected_if_rows_cannot_be_matched(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    assert group.double_rows(batch(4)).batch["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"double_rows returned 4 rows for 2 input rows, 1 of them padding"):
        group.double_rows(batch(3))


def test_batches_without_tensors(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    out = group.upper(DataProto.from_dict(non_tensors={"uid": ["a", "b", "c"]}))
    assert out.batch is None and out.non_tensor_batch["name"].tolist() == ["A", "B", "C"]


def test_several_batches_in_one_call(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    assert group.add_batches(batch(3), b=batch(3)).batch["y"].tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match=r"same number of rows, got \{'argument 0': 3, \"argument 'b'\": 4\}"):
        group.add_batches(batch(3), b=batch(4))


def test_values_that_cannot_be_split_or_joined(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    with pytest.raises(TypeError, match="argument 0 is a list; only DataProto and TensorDict can be split by rows"):
        group.scale([1, 2])
    with pytest.raises(ValueError, match="no rows to split in argument 0"):
        group.scale(batch(0))
    with pytest.raises(TypeError, match="part 0 of the output is a int"):
        group.no_batch(batch(2))


def test_metric(backend: Backend) -> None:
    assert make_group(backend, Scaler, [2]).count(batch(3)) == [{"rank": 0, "rows": 2}, {"rank": 1, "rows": 1}]


def shift(worker: Scaler, data: DataProto) -> DataProto:
    return DataProto.from_dict({"y": data.batch["x"] + 10 * worker.rank})


def test_function_for_every_rank(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    assert group.execute_with_func_generator(shift, batch(3)).batch["y"].tolist() == [0, 1, 12]
    with pytest.raises(TypeError, match="the first argument must be a function"):
        group.execute_with_func_generator(batch(3))


def test_custom_modes(backend: Backend) -> None:
    assert make_group(backend, Scaler, [3]).custom(["a", "b", "c"]) == "0c+1b+2a"


def test_coroutine_methods(backend: Backend) -> None:
    assert make_group(backend, Scaler, [2]).wait(5) == [5, 6]


@pytest.mark.parametrize("rows", [4, 3])
def test_mesh_splits_over_its_data_parallel_ranks(backend: Backend, rows: int) -> None:
    group = make_group(backend, Meshed, [4])
    out = group.tag(batch(rows))
    assert out.batch["x"].tolist() == list(range(rows)) and out.batch["rank"].tolist() == [3, 3, 2, 2][:rows]
    assert group.tag_later(batch(rows)).get().batch["x"].tolist() == [100 + i for i in range(rows)]


def test_mesh_errors(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"mesh 'modle' is not registered: .* Did you mean 'model'"):
        make_group(backend, Meshed, [4]).unknown_mesh(batch(4))
    with pytest.raises(ValueError, match=r"data-parallel rank 0 of 2 is collected from ranks \[1, 3\]"):
        make_group(backend, Meshed, [4], collect_all=True).tag(batch(4))
    with pytest.raises(ValueError, match=r"data-parallel rank 0 of 2 is collected from ranks \[\]"):
        make_group(backend, Meshed, [1]).tag(batch(4))


def test_non_blocking_calls_have_get(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2], 3)
    assert group.rank_later().get() == [0, 1]
    assert group.first_later().get() == "first"
    future = group.scale_later(batch(3))
    assert isinstance(future, DataProtoFuture) and future.get().batch["x"].tolist() == [0, 3, 6]


def test_futures_go_to_the_next_group_unresolved(backend: Backend) -> None:
    first, second = make_group(backend, Scaler, [3], 2), make_group(backend, Scaler, [2], 10)
    future = first.scale_later(batch(5))
    out = second.scale(future)
    assert out.batch["y"].tolist() == [0, 20, 40, 60, 80] and out.batch["rank"].tolist() == [0, 0, 0, 1, 1]
    assert out.meta_info["metrics"]["sum"] == [0 + 2 + 4, 6 + 8]
    assert second.scale_later(first.scale_later(future)).get().batch["x"].tolist() == [0, 40, 80, 120, 160]
    assert second.whole_sum(future) == [20, 20]


def test_colocated_roles_share_workers(backend: Backend) -> None:
    roles = {
        "small": backend.class_with_init(Scaler, 2),
        "large": backend.class_with_init(Scaler, factor=100),
        "mesh": backend.class_with_init(Meshed),
    }
    whole = backend.group_class(backend.pool_class(process_on_nodes=[4]), create_colocated_worker_cls(roles))
    assert whole.small_set_factor(3) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    groups = whole.spawn(roles.keys())
    assert list(groups) == ["small", "large", "mesh"] and all(group.world_size == 4 for group in groups.values())
    assert groups["small"].scale(batch(3)).batch["y"].tolist() == [0, 3, 6]
    assert groups["large"].scale(batch(3)).batch["y"].tolist() == [0, 100, 200]
    assert groups["mesh"].tag(batch(4)).batch["rank"].tolist() == [3, 3, 2, 2]
    assert groups["large"].scale(groups["small"].scale_later(batch(2))).batch["y"].tolist() == [0, 300]
    with pytest.raises(ValueError, match=r"has no role 'tiny'. Known: large, mesh, small"):
        whole.spawn(["tiny"])
    with pytest.raises(LookupError) as caught:
        groups["small"].fail_on(1)
    assert "raised in worker group 'small' by Scaler.fail_on on rank 1 of 4" in notes_of(caught.value)


def test_colocated_names_must_not_clash(backend: Backend) -> None:
    class Other(Scaler):
        pass

    Other.b_scale = Scaler.scale  # type: ignore[attr-defined]
    roles = {"a": backend.class_with_init(Other), "a_b": backend.class_with_init(Scaler)}
    with pytest.raises(ValueError, match="role 'a_b' method 'scale': another role already has a method a_b_scale"):
        create_colocated_worker_cls(roles)
    with pytest.raises(TypeError, match="role 'x': int is not a Worker"):
        create_colocated_worker_cls({"x": backend.class_with_init(int)})


def test_worker_error_names_its_rank(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    with pytest.raises(LookupError, match="no such thing") as caught:
        group.fail_on(1)
    text = "".join(traceback.format_exception(caught.value))
    assert "raised in worker group 'Scaler' by Scaler.fail_on on rank 1 of 2" in text
    assert 'raise LookupError("no such thing")' in text


def test_error_of_a_non_blocking_call_is_raised_by_get(backend: Backend) -> None:
    group = make_group(backend, Scaler, [2])
    future = group.fail_later(batch(2))
    with pytest.raises(LookupError) as caught:
        future.get()
    assert re.search("raised in worker group 'Scaler' by Scaler.fail_later on rank [01] of 2", notes_of(caught.value))
    with pytest.raises(LookupError):
        group.scale(future)


def test_error_in_construction(backend: Backend) -> None:
    with pytest.raises(MemoryError) as caught:
        make_group(backend, Breaking, [2])
    assert "raised in worker group 'Breaking' by Breaking.__init__ on rank 1 of 2" in notes_of(caught.value)


def test_unregistered_and_unknown_methods(backend: Backend) -> None:
    group = make_group(backend, Scaler, [1])
    with pytest.raises(AttributeError, match=r"Scaler.private_to_the_worker has no @register"):
        group.private_to_the_worker()
    with pytest.raises(AttributeError, match=r"Scaler has no method 'scael'. Did you mean 'scale'"):
        group.scael(batch(1))


def test_world_sizes_give_the_same_result(backend: Backend) -> None:
    outputs = [make_group(backend, Scaler, [n], 3).scale(batch(4)).batch["y"] for n in (1, 2, 3, 4, 5)]
    assert all(torch.equal(outputs[0], other) for other in outputs)
