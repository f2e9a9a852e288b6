"""Ray processes reused by many training runs, because importing in a new process takes as long as a tiny run."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.utils.distributed import leave_process_group

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from lockstep.single_controller.ray_backend import RayWorkerGroup, connect, disconnect
from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.single_controller.ray_backend.group import Processes
from lockstep.single_controller.ray_backend.host import WorkerHost


class SharedProcesses:
    """Processes that are lent to worker groups and outlive them.

    Groups of a given size start at multiples of it, so that a process has the same rank in all of them: torch caches per process
    the mesh of each size.
    """

    def __init__(self, count: int) -> None:
        self.handles = [ray.remote(WorkerHost).options(num_cpus=0).remote() for _ in range(count)]
        self.lent: set[int] = set()

    def take(self, count: int) -> list[int]:
        for start in range(0, len(self.handles) - count + 1, count):
            places = list(range(start, start + count))
            if not self.lent & set(places):
                self.lent |= set(places)
                return places
        raise RuntimeError(f"{count} processes requested, but {self.lent} of {len(self.handles)} are lent")


class Borrowed(Processes):
    """Returned at shutdown, after leaving their process group."""

    def __init__(self, shared: SharedProcesses, count: int) -> None:
        self._shared, self._places = shared, shared.take(count)
        super().__init__([shared.handles[i] for i in self._places], [str(i) for i in self._places], None)

    def shutdown(self) -> None:
        handles, self.handles[:] = list(self.handles), []
        ray.get([handle.call.remote("execute_func_rank_zero", "", leave_process_group) for handle in handles])
        self._shared.lent -= set(self._places)
        self._places = []


class OnSharedProcesses(TaskRunner):
    """Training runs whose workers run in the shared processes."""

    def __init__(self, shared: SharedProcesses) -> None:
        super().__init__()
        self.shared = shared

    def build(self, config: PPOConfig) -> PPOTrainer:
        trainer = super().build(config)
        if controller_of(config) == "ray":
            trainer.worker_group_cls = _group_class(self.shared)
        return trainer


def _group_class(shared: SharedProcesses) -> type[RayWorkerGroup]:
    class GroupOnSharedProcesses(RayWorkerGroup):
        def _start_processes(self) -> Processes:
            return Borrowed(shared, self.world_size)

    return GroupOnSharedProcesses


@contextmanager
def shared_processes(count: int) -> Iterator[SharedProcesses]:
    """Processes on the current cluster, or on a new one.

    They reserve no resources, so that the size of the cluster does not matter.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_ADDRESS", "local")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_worker_niceness", "0")  # else other tests on the same cores starve them
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        is_ours = not ray.is_initialized()
        connect(num_cpus=count, log_to_driver=False, logging_level="ERROR", object_store_memory=256 << 20)
        shared = SharedProcesses(count)
        try:
            ray.get([handle.info.remote() for handle in shared.handles])
            yield shared
        finally:
            for handle in shared.handles:
                ray.kill(handle, no_restart=True)
            if is_ours:
                disconnect()
