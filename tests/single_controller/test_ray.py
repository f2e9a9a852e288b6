"""Specific to the Ray backend: processes, placement, the object store, dead workers."""

import os
import subprocess
import sys
import time
import traceback
from typing import NoReturn

import pytest
import torch

from lockstep.protocol import DataProto
from lockstep.single_controller import Backend, Dispatch, Worker, create_colocated_worker_cls, register
from lockstep.single_controller.futures import WorkerError
from tests.single_controller.contract import Scaler, batch, make_group

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from lockstep.single_controller.ray_backend import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerDiedError,
    futures,
    group as group_module,
)
from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.single_controller.ray_backend.serialize import pack, unpack

pytestmark = pytest.mark.first


class OddError(Exception):
    """Cannot be rebuilt from its message."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class Summer(Worker):
    """Joins the process group on construction."""

    def __init__(self) -> None:
        super().__init__()
        torch.distributed.init_process_group("gloo", init_method="env://")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> tuple[int, dict[str, str]]:
        total = torch.tensor(self.rank + 10)
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return int(total), {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}


class Unruly(Worker):
    """A misbehaving worker."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def write_in_place(self, data: DataProto) -> DataProto:
        data.tensors["x"][0] += 1
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_odd(self) -> None:
        raise OddError(7, "odd")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rows(self) -> DataProto:
        return batch(2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> NoReturn:
        if self.rank == rank:
            os._exit(3)
        time.sleep(600)  # like a rank that waits for the dead one in a collective
        raise AssertionError

    def not_registered(self, a: int, b: int = 0) -> tuple[int, int]:
        return self.rank, a + b


def this_machine() -> str:
    return str(ray.nodes()[0]["NodeManagerAddress"])


def test_ray_is_imported_on_first_use() -> None:
    code = """
import sys
import lockstep.single_controller as sc
assert "ray" not in sys.modules
sys.modules["ray"] = None
try:
    sc.RayWorkerGroup
except ImportError as error:
    assert str(error) == 'the Ray backend needs Ray: pip install "lockstep-rl[ray]"', error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_process_group_from_the_environment(ray_on_shared_processes: Backend) -> None:
    group = make_group(ray_on_shared_processes, Summer, [2])
    (first, env0), (second, env1) = group.sum_of_ranks()
    assert first == second == 10 + 11
    assert (env0["RANK"], env0["WORLD_SIZE"], env0["LOCAL_RANK"]) == ("0", "2", "0")
    assert (env1["RANK"], env1["WORLD_SIZE"], env1["LOCAL_RANK"]) == ("1", "2", "1")
    assert env0["MASTER_PORT"] == env1["MASTER_PORT"] == str(group.master_port)
    assert group.master_address == this_machine()


def test_any_method_can_be_executed(ray_on_shared_processes: Backend) -> None:
    group = make_group(ray_on_shared_processes, Unruly, [2])
    assert group.execute_all_sync("not_registered", 1, b=2) == [(0, 3), (1, 3)]
    assert group.execute_all_async("not_registered", 5).get() == [(0, 5), (1, 5)]
    assert group.execute_rank_zero_sync("not_registered", 1) == (0, 1)
    assert group.execute_rank_zero_async("not_registered", 2, b=1).get() == (0, 3)
    roles = {"role": RayClassWithInitArgs(Unruly)}
    colocated = ray_on_shared_processes.group_class(
        ray_on_shared_processes.pool_class(process_on_nodes=[2]), create_colocated_worker_cls(roles)
    )
    assert colocated.spawn(["role"])["role"].execute_all_sync("rows")[1].batch["x"].tolist() == [0, 1]


def test_outputs_are_writable_and_arguments_are_not(ray_on_shared_processes: Backend) -> None:
    group = make_group(ray_on_shared_processes, Unruly, [2])
    for out in (
        group.rows()[0],
        group.execute_all_sync("rows")[1],
        make_group(ray_on_shared_processes, Scaler, [1]).same_batch(batch(2)),
    ):
        out.batch["x"] += 5
        assert out.batch["x"].tolist() == [5, 6]
    group = make_group(ray_on_shared_processes, Unruly, [2])
    with pytest.raises(
        ValueError, match=r"Unruly.write_in_place wrote in place into batch key 'x' .* clone the tensor"
    ):
        group.write_in_place(batch(4))


def test_futures_do_not_pass_through_the_controller(
    ray_on_shared_processes: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    monkeypatch.setattr(futures, "unpack", lambda *args: fetched.append(args) or unpack(*args))
    first, second = (make_group(ray_on_shared_processes, Scaler, [2], factor) for factor in (2, 10))
    fetched.clear()
    future = second.scale_later(first.scale_later(batch(5)))
    assert not fetched
    assert future.get().batch["x"].tolist() == [0, 20, 40, 60, 80] and len(fetched) == 2


def test_error_has_one_readable_traceback(ray_on_shared_processes: Backend) -> None:
    first, second = (make_group(ray_on_shared_processes, Scaler, [2]) for _ in range(2))
    with pytest.raises(LookupError) as caught:
        second.scale(first.fail_later(batch(2)))
    text = "".join(traceback.format_exception(caught.value))
    assert text.count('raise LookupError("no such thing")') == 1 and "RayTaskError" not in text
    assert (
        "by Scaler.fail_later on rank" in text
        and "by Scaler.scale on rank" in text
        and f"node {this_machine()}, pid" in text
    )


def test_exceptions_that_cannot_be_pickled(ray_on_shared_processes: Backend) -> None:
    group = make_group(ray_on_shared_processes, Unruly, [2])
    with pytest.raises(WorkerError, match=r"^OddError: odd \(7\)") as caught:
        group.raise_odd()
    assert "by Unruly.raise_odd on rank" in caught.value.__notes__[0]
    assert 'raise OddError(7, "odd")' in caught.value.__notes__[1]


def test_group_life_cycle(ray_cluster: None) -> None:
    """Start two processes in two placement groups, attach by name, lose one, clean up."""
    before = set(ray.util.list_named_actors(all_namespaces=False))
    pool = RayResourcePool([1, 1], use_gpu=False, name_prefix="life", detached=True)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Unruly), name="mortal") as group:
        assert len(set(ray.util.list_named_actors()) - before) == 2 and "life_mortal-" in group.worker_names[0]
        assert group.execute_all_sync("not_registered", 1) == [(0, 1), (1, 1)]

        attached = RayWorkerGroup.from_detached("life", group.worker_names, RayClassWithInitArgs(Unruly))
        assert attached.world_size == 2 and attached.resource_pool.store == [1, 1]
        assert attached.master_port == group.master_port
        assert attached.execute_all_sync("not_registered", 2) == [(0, 2), (1, 2)]
        with pytest.raises(ValueError, match=r"have ranks \[1, 0\]; give all 2 names of the group in rank order"):
            RayWorkerGroup.from_detached("life", group.worker_names[::-1], RayClassWithInitArgs(Unruly))
        with pytest.raises(ValueError, match="no such worker"):
            RayWorkerGroup.from_detached("life", ["nobody:0"], RayClassWithInitArgs(Unruly))

        started = time.monotonic()
        with pytest.raises(
            WorkerDiedError, match=rf"worker group 'mortal', rank 1 of 2, node {this_machine()}, pid .* Unruly.die"
        ):
            group.die(1)
        with pytest.raises(WorkerDiedError, match="worker group 'mortal', rank 1 of 2"):
            group.rows()
        assert time.monotonic() - started < 10
    assert set(ray.util.list_named_actors()) == before
    assert not [g for g in ray.util.placement_group_table().values() if "life" in g["name"] and g["state"] != "REMOVED"]
    with pytest.raises(RuntimeError, match="worker group 'mortal' is shut down"):
        group.rows()
    group.shutdown()


def test_death_is_reported_before_the_errors_it_causes(ray_cluster: None) -> None:
    class Peer:  # local, so that its process imports nothing
        def lose_connection(self) -> NoReturn:
            raise ConnectionError("reset by peer")

        def die(self) -> NoReturn:
            time.sleep(0.3)
            os._exit(1)

    first, second = (ray.remote(Peer).options(num_cpus=0).remote() for _ in range(2))
    for peer in (first, second):  # both processes have started
        with pytest.raises(ConnectionError):
            futures.RayFuture(peer.lose_connection.remote(), "rank 0").get()
    calls = [
        futures.RayFuture(first.lose_connection.remote(), "rank 0"),
        futures.RayFuture(second.die.remote(), "rank 1"),
    ]
    with pytest.raises(WorkerDiedError, match="the worker's process died: rank 1") as caught:
        futures.RayFuture.get_all(calls)
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_processes_of_an_earlier_session_are_neither_watched_nor_stopped(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (futures, group_module):
        monkeypatch.setattr(module, "session", lambda: ("earlier node", "01"))
    probe, processes = futures.LivenessProbe(None, str), group_module.Processes([object()], ["gone"], None)
    futures.PROBES.add(probe)
    monkeypatch.undo()
    futures.raise_deaths()
    assert probe not in futures.PROBES
    processes.shutdown()
    assert not processes.handles


def test_missing_resources_are_reported_immediately(ray_cluster: None) -> None:
    started = time.monotonic()
    with pytest.raises(
        ValueError,
        match=r"pool 'big' needs 1 machine with 0 GPU and 99 CPU; the Ray cluster has 1 machine: "
        rf"{this_machine()} with 0 GPU and 8 CPU. Lower trainer.n_gpus_per_node",
    ):
        RayWorkerGroup(RayResourcePool([99], use_gpu=False, name_prefix="big"), RayClassWithInitArgs(Worker))
    with pytest.raises(ValueError, match="pool 'g' needs 2 machines with 2 GPU and 2 CPU"):
        RayResourcePool([2, 2], name_prefix="g").get_placement_groups()
    holder = RayResourcePool([3], use_gpu=False, name_prefix="holder")
    holder.get_placement_groups()
    with pytest.raises(ValueError, match=r"pool 'late' needs 1 machine .* Only 0 GPU and [0-5] CPU are free"):
        RayResourcePool([6], use_gpu=False, name_prefix="late", wait_s=1).get_placement_groups()
    holder.shutdown()
    assert time.monotonic() - started < 10


def test_pool_limits_the_number_of_groups() -> None:
    pool = RayResourcePool([1], use_gpu=False, name_prefix="p", max_colocate_count=1)
    pool.acquire("a")
    with pytest.raises(ValueError, match="worker group 'b': resource pool 'p' already has 1 groups"):
        pool.acquire("b")
    assert [RayResourcePool([1], max_colocate_count=n).share for n in (1, 3, 7)] == [1.0, 0.3333, 0.1428]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_pack_round_trip(dtype: torch.dtype) -> None:
    whole = DataProto.from_dict({"x": torch.arange(12).reshape(6, 2).to(dtype)}, {"u": list("abcdef")}, {"t": 1})
    stored = pack(whole[2:4])
    assert (
        stored.columns["x"].raw.nbytes == 4 * whole.tensors["x"].element_size()
    )  # its own rows, not the whole storage
    assert stored.columns["x"].raw.base is not None  # no copy
    back = unpack(stored)
    assert torch.equal(back.tensors["x"], whole.tensors["x"][2:4]) and back.tensors["x"].dtype is dtype
    assert back.non_tensor_batch["u"].tolist() == ["c", "d"] and back.meta_info == {"t": 1}
    assert unpack(pack(DataProto(meta_info={"m": 1}))) == DataProto(meta_info={"m": 1})
    assert unpack(pack({"a": 1})) == {"a": 1}
