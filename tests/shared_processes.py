"""Ray processes reused by many worker groups and training runs, because importing in a new process takes longer than a tiny run."""

from collections import deque

from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.single_controller.environment import ProcessEnvironment
from lockstep.single_controller.ray_backend import RayWorkerGroup
from lockstep.single_controller.ray_backend.cluster import ray
from lockstep.single_controller.ray_backend.group import Processes
from lockstep.single_controller.ray_backend.host import WorkerHost
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.utils.distributed import leave_process_group


class SharedProcesses:
    """Processes that are lent to worker groups and outlive them. They reserve no resources of the cluster.

    Groups of a given size start at multiples of it, so that a process has the same rank in all of them: torch caches per process
    the mesh of each size.
    """

    def __init__(self, count: int) -> None:
        start = ray.remote(WorkerHost).options(num_cpus=0).remote
        self.handles = [start(ProcessEnvironment.capture()) for _ in range(count)]
        self.lent: set[int] = set()
        self._turns = deque(range(count))

    def take(self, count: int) -> list[int]:
        for start in range(0, len(self.handles) - count + 1, count):
            places = list(range(start, start + count))
            if not self.lent & set(places):
                self.lent |= set(places)
                return places
        raise RuntimeError(f"{count} processes requested, but {self.lent} of {len(self.handles)} are lent")

    def least_recent(self, count: int) -> Processes:
        """For groups that nothing shuts down: the processes whose last group is oldest."""
        places = [self._turns.popleft() for _ in range(count)]
        self._turns.extend(places)
        return Reused([self.handles[i] for i in places], [str(i) for i in places], None)


class Reused(Processes):
    def shutdown(self) -> None:
        """No-op: the processes outlive their groups."""


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
            trainer.workers.group_class = group_class(self.shared)
        return trainer


def group_class(shared: SharedProcesses) -> type[RayWorkerGroup]:
    class GroupOnSharedProcesses(RayWorkerGroup):
        def _start_processes(self) -> Processes:
            return Borrowed(shared, self.world_size)

    return GroupOnSharedProcesses
