"""A backend whose groups share a few processes: starting one takes seconds of imports, so only tests about processes do."""

import functools
from typing import TYPE_CHECKING

import pytest

from lockstep.single_controller import Backend

if TYPE_CHECKING:
    from tests.shared_processes import SharedProcesses


@pytest.fixture(scope="session")
def ray_on_shared_processes(shared_processes: "SharedProcesses") -> Backend:
    """The Ray backend, but groups use the least recently used of the shared processes; the two groups of a test must fit."""
    from lockstep.single_controller.ray_backend import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from lockstep.single_controller.ray_backend.group import Processes

    class GroupOnSharedProcesses(RayWorkerGroup):
        def _start_processes(self) -> Processes:
            return shared_processes.least_recent(self.world_size)

    pool_class = functools.partial(RayResourcePool, use_gpu=False)
    return Backend("ray", pool_class, RayClassWithInitArgs, GroupOnSharedProcesses)
