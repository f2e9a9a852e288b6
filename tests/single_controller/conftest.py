"""One Ray cluster for the test session, and a backend whose groups share a few processes.

Starting a process takes seconds of imports, so only tests about processes start their own.
"""

import functools
import os
from collections import deque
from collections.abc import Iterator

import pytest

from lockstep.single_controller import Backend, Worker

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback only; Ray reads it on import

NUM_SHARED = 5
"""Processes shared by groups; the two groups of a test must fit."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A small local cluster, even if the environment names another."""
    pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')
    from lockstep.single_controller.ray_backend import connect, disconnect

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_ADDRESS", "local")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        connect(
            num_cpus=8, log_to_driver=False, logging_level="ERROR", object_store_memory=256 << 20, namespace="tests"
        )
        yield
        disconnect()


@pytest.fixture(scope="session")
def ray_on_shared_processes(ray_cluster: None) -> Backend:
    """The Ray backend, but groups use the least recently used of the shared processes."""
    from lockstep.single_controller.ray_backend import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from lockstep.single_controller.ray_backend.group import Processes

    pool = RayResourcePool([NUM_SHARED], use_gpu=False, name_prefix="shared")
    owner = RayWorkerGroup(pool, RayClassWithInitArgs(Worker))
    turns = deque(zip(owner.workers, owner.worker_names))

    class Borrowed(Processes):
        def shutdown(self) -> None:
            """No-op: the processes belong to the fixture."""

    class GroupOnSharedProcesses(RayWorkerGroup):
        def _start_processes(self) -> Processes:
            taken = [turns.popleft() for _ in range(self.world_size)]
            turns.extend(taken)
            return Borrowed([handle for handle, _ in taken], [name for _, name in taken], None)

    pool_class = functools.partial(RayResourcePool, use_gpu=False)
    return Backend("ray", pool_class, RayClassWithInitArgs, GroupOnSharedProcesses)
