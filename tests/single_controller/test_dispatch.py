"""@register and dispatch modes, without a group."""

import pytest

from lockstep.protocol import DataProto
from lockstep.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from lockstep.single_controller.dispatch import get_predefined_dispatch_fn, is_collected, registered_methods


def test_every_mode_has_its_functions() -> None:
    for mode in Dispatch:
        assert set(get_predefined_dispatch_fn(mode)) == {"dispatch_fn", "collect_fn"}


def test_unknown_and_duplicate_modes() -> None:
    with pytest.raises(
        ValueError, match=r"'DP_COMPUTE_PROTOS': no such dispatch mode. Did you mean 'DP_COMPUTE_PROTO'"
    ):
        register(dispatch_mode="DP_COMPUTE_PROTOS")
    with pytest.raises(ValueError, match="'ONE_TO_ALL' is already registered"):
        register_dispatch_mode("ONE_TO_ALL", lambda group: ((), {}), lambda group, outputs: outputs)


def test_registered_mode_is_an_attribute_of_dispatch() -> None:
    mode = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)
    register_dispatch_mode("TEST_ATTRIBUTE", mode["dispatch_fn"], lambda group, outputs: sum(outputs))

    class Counting(Worker):
        @register(dispatch_mode=Dispatch.TEST_ATTRIBUTE)  # type: ignore[attr-defined]
        def count(self, number: int) -> int:
            return number + self.rank

    assert LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Counting)).count(10) == 21
    with pytest.raises(AttributeError):
        _ = Dispatch.TEST_OTHER  # type: ignore[attr-defined]


def test_rank_zero_rejects_split_batches() -> None:
    with pytest.raises(
        ValueError, match="RANK_ZERO would drop the other ranks' shares of dispatch_mode DP_COMPUTE_PROTO"
    ):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)


def test_registered_methods_include_inherited_ones() -> None:
    class Child(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        def mine(self) -> None: ...

    methods = registered_methods(Child)
    assert {"mine", "execute_func_rank_zero", "_query_dispatch_collect_info"} <= methods.keys()
    assert not methods["mine"].blocking and methods["execute_func_rank_zero"].execute_mode is Execute.RANK_ZERO


def test_method_must_not_shadow_one_of_the_group() -> None:
    class Hiding(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def spawn(self) -> None: ...

    with pytest.raises(ValueError, match=r"Hiding\.spawn: worker groups use that name, rename it"):
        LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Hiding))


def test_worker_without_a_group() -> None:
    class Alone(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def rows(self, data: DataProto) -> int:
            return len(data) + self.rank + self.world_size

    assert Alone().rows(DataProto.from_dict(non_tensors={"uid": ["a"]})) == 2


def test_mesh_is_registered_once() -> None:
    worker = Worker()
    worker._register_dispatch_collect_info("actor", 0, True)
    worker._register_dispatch_collect_info("actor", 0, True)
    with pytest.raises(ValueError, match="mesh 'actor' is already registered"):
        worker._register_dispatch_collect_info("actor", 1, True)


def test_outputs_that_nobody_reads_are_not_sent_but_given_to_callers_in_the_worker() -> None:
    class Scoring(Worker):
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
        def score(self, number: int) -> int:
            return number + 1

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def ask(self) -> int:
            return self.score(1)

    workers = [Scoring(), Scoring()]
    for worker, collected in zip(workers, (True, False)):
        worker._register_dispatch_collect_info("actor", 0, collected)
        assert worker.ask() == 2
        assert is_collected(worker, worker.score) == collected and is_collected(worker, worker.ask)
