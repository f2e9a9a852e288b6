"""One Ray cluster for the session, and a backend on it whose groups take turns on the same few processes.

A process costs seconds of imports, so that only tests about processes start their own.
"""

import functools
import os
from collections import deque
from collections.abc import Iterator

import pytest

from lockstep.single_controller import Backend, Worker

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback alone; Ray reads it while it is imported

NUM_SHARED = 5
"""Processes that groups take turns on: the two groups that a test uses at a time must fit."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A small cluster of its own, even where the environment names another."""
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
    """The Ray backend, except that a group constructs its workers in the processes which were unused for longest."""
    from lockstep.single_controller.ray_backend import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from lockstep.single_controller.ray_backend.group import Processes

    pool = RayResourcePool([NUM_SHARED], use_gpu=False, name_prefix="shared")
    owner = RayWorkerGroup(pool, RayClassWithInitArgs(Worker))
    turns = deque(zip(owner.workers, owner.worker_names))

    class Borrowed(Processes):
        def shutdown(self) -> None:
            """They are the fixture's."""

    class GroupOnSharedProcesses(RayWorkerGroup):
        def _start_processes(self) -> Processes:
            taken = [turns.popleft() for _ in range(self.world_size)]
            turns.extend(taken)
            return Borrowed([handle for handle, _ in taken], [name for _, name in taken], None)

    pool_class = functools.partial(RayResourcePool, use_gpu=False)
    return Backend("ray", pool_class, RayClassWithInitArgs, GroupOnSharedProcesses)
