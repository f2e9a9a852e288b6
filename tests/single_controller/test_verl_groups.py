"""Worker groups of `lockstep.verl` on Ray: what programs on verl call on them."""

import os

import pytest
import torch

from lockstep.single_controller import Backend
from lockstep.verl import DataProto
from lockstep.verl.single_controller.base import Worker
from lockstep.verl.single_controller.base.decorator import Dispatch, register

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls_fused,
    split_resource_pool,
)
from lockstep.verl.utils.ray_utils import parallel_put

pytestmark = pytest.mark.first


class Counter(Worker):
    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.start = start

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_in_place(self, data: DataProto) -> DataProto:
        data.batch["x"] += self.start
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, number: int) -> int:
        return self.start + self.rank + number

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def first_later(self) -> DataProto:
        return batch(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto) -> DataProto:
        return self.add_in_place(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self, *names: str) -> list[str]:
        return [os.environ[name] for name in names]

    def plain(self, number: int, add: int = 0) -> int:
        return self.start + self.rank + number + add

    def rows(self, data: DataProto) -> DataProto:
        data.batch["x"] *= 2
        return data

    def fail(self) -> None:
        raise LookupError("no such thing")


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, meta_info={"temperature": 1.0})


@pytest.fixture
def group(ray_on_shared_processes: Backend) -> RayWorkerGroup:
    return make_group(ray_on_shared_processes, RayClassWithInitArgs(ray.remote(Counter), start=100))


def make_group(shared: Backend, cls_with_init: RayClassWithInitArgs) -> RayWorkerGroup:
    class OnSharedProcesses(RayWorkerGroup):
        _start_processes = shared.group_class._start_processes  # type: ignore[attr-defined]

    return OnSharedProcesses(RayResourcePool([2], use_gpu=False), cls_with_init)


def test_references_for_ray_get(group: RayWorkerGroup) -> None:
    assert ray.get(group.execute_all_async("plain", 1, add=2)) == [103, 104]
    assert ray.get(group.execute_rank_zero_async("plain", 5)) == 105
    assert ray.get(group.later(10)) == [110, 111]
    assert ray.get(group.first_later()).batch["x"].tolist() == [0, 1]
    assert group.execute_all_sync("plain", ray.put(7)) == [107, 108]
    assert group.execute_rank_zero_sync("plain", 5) == 105
    with pytest.raises(LookupError, match="no such thing"):
        ray.get(group.execute_all("fail"))


def test_lists_with_one_item_per_rank_are_distributed(group: RayWorkerGroup) -> None:
    assert group.execute_all_sync("plain", [1, 2], add=[10, 20]) == [111, 123]
    parts = ray.get(group.execute_all_async("rows", batch(4).chunk(2)))
    assert [part.batch["x"].tolist() for part in parts] == [[0, 2], [4, 6]]


def test_a_worker_may_write_into_its_arguments(group: RayWorkerGroup) -> None:
    data = batch(3)
    out = group.add_in_place(data)
    assert out.batch["x"].tolist() == [100, 101, 102] and out.meta_info == {"temperature": 1.0}
    assert group.add_in_place(group.add_later(data)).batch["x"].tolist() == [200, 201, 202]
    assert data.batch["x"].tolist() == [0, 1, 2]
    (first, second) = group.execute_all_sync("rows", data)  # each rank has its own copy
    assert first.batch["x"].tolist() == second.batch["x"].tolist() == [0, 2, 4]


def test_fused_roles(ray_on_shared_processes: Backend) -> None:
    roles = {"a": RayClassWithInitArgs(Counter, 10), "b": RayClassWithInitArgs(ray.remote(Counter), 20)}
    fused = make_group(ray_on_shared_processes, create_colocated_worker_cls_fused(roles))
    assert ray.get(fused.spawn_fused(roles.keys())["b"].later(1)) == [21, 22]
    fused.fuse(["a"])
    assert fused.a.add_in_place(batch(2)).batch["x"].tolist() == [10, 11]


def test_environment_of_the_workers(ray_cluster: None) -> None:
    pool = RayResourcePool([1], use_gpu=False, name_prefix="env")
    with RayWorkerGroup(pool, RayClassWithInitArgs(Counter), worker_env={"MY_VARIABLE": "mine"}) as group:
        assert group.variables("MY_VARIABLE", "RAY_LOCAL_WORLD_SIZE", "WORLD_SIZE") == [["mine", "1", "1"]]


def test_a_group_on_a_part_of_a_pool(ray_cluster: None) -> None:
    whole = RayResourcePool([2], use_gpu=False, name_prefix="whole")
    first, _ = split_resource_pool(whole, 1)
    with RayWorkerGroup(first, RayClassWithInitArgs(Counter, 5)) as group:
        assert group.world_size == 1 and group.add_in_place(batch(2)).batch["x"].tolist() == [5, 6]
        with pytest.raises(ValueError, match="has started workers"):
            split_resource_pool(first, 1)


def test_objects_are_put_in_their_order(ray_cluster: None) -> None:
    assert ray.get(parallel_put(list(range(20)), max_workers=4)) == list(range(20))
    with pytest.raises(AssertionError, match="no objects"):
        parallel_put([])
