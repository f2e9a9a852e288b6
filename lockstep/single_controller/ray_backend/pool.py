"""RayResourcePool: machines reserved as placement groups, one per machine."""

import logging
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from lockstep.single_controller.futures import WorkerDiedError
from lockstep.single_controller.ray_backend.cluster import Bundle, missing, ray, require_machines
from lockstep.single_controller.ray_backend.reservation import StartedProcesses, bundle_of, reserve
from lockstep.single_controller.worker_group import ResourcePool

logger = logging.getLogger(__name__)

NOTICE_S = 2.0
"""After this long, waiting for resources is logged."""


class RayResourcePool(ResourcePool):
    """Each entry of `process_on_nodes` is a placement group on one machine, with one bundle per process.

    use_gpu:            a bundle has one GPU besides its logical CPU.
    max_colocate_count: how many worker groups share the bundles; a worker takes that fraction of one.
    detached:           the reservation outlives this program, for detached workers.
    wait_s:             how long to wait for resources that other programs use.
    started:            processes started early, by pool; used if name and shape match.
    actor_options:      Ray options of processes that were not started early.
    wait_for_machines:  also wait for machines that have not joined the cluster yet.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str = "",
        max_colocate_count: int = 10,
        detached: bool = False,
        n_gpus_per_node: int = 8,
        wait_s: float = 8.0,
        wait_for_machines: bool = False,
        started: dict[str, StartedProcesses] | None = None,
        actor_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count, n_gpus_per_node, name_prefix)
        self.use_gpu = use_gpu
        self.detached = detached
        self.wait_s = wait_s
        self.wait_for_machines = wait_for_machines
        self.actor_options = actor_options or {}
        self._placement_groups: list[Any] = []
        self._is_ready = False
        self._num_groups = 0
        early = (started or {}).get(name_prefix)
        if early is not None and (early.process_on_nodes, early.use_gpu) == (self.store, use_gpu) and not detached:
            assert started is not None
            self._early: StartedProcesses | None = started.pop(name_prefix)
            self._placement_groups = self._early.placement_groups
        else:
            self._early = None

    @property
    def bundle(self) -> Bundle:
        """What one process of the pool reserves."""
        return bundle_of(self.use_gpu)

    @property
    def share(self) -> float:
        """The fraction of a bundle that one worker takes. Rounded down: Ray counts in units of 1/10000."""
        return math.floor(10_000 / self.max_colocate_count) / 10_000

    def get_placement_groups(self) -> list[Any]:
        """One per machine, reserved at the first call; ValueError if the cluster lacks the resources."""
        if self._is_ready:
            return self._placement_groups
        asked = [{name: amount * count for name, amount in self.bundle.items()} for count in self.store]
        end = time.monotonic() + self.wait_s
        if not self._placement_groups:
            require_machines(self.name_prefix, asked, until=end if self.wait_for_machines else 0)
            unique = f"{self.name_prefix or 'pool'}-{uuid.uuid4().hex[:6]}"
            self._placement_groups = reserve(unique, self.store, self.bundle, self.detached)
        if not self._wait_until(time.monotonic() + NOTICE_S):
            logger.warning(
                "waiting up to %.0f s for resources: %s", self.wait_s, missing(self.name_prefix, asked, busy=True)
            )
        if not self._wait_until(end):
            reason = missing(self.name_prefix, asked, busy=True)
            self.shutdown()
            raise ValueError(reason)
        self._is_ready = True
        return self._placement_groups

    def _wait_until(self, end: float) -> bool:
        """Whether all placement groups are ready by then."""
        try:
            return all(group.wait(max(0.1, end - time.monotonic())) for group in self._placement_groups)
        except Exception as error:  # a plain one, if the machine was lost
            raise WorkerDiedError(f"Ray lost the machines of resource pool {self.name_prefix!r}: {error}") from error

    def take_early(self) -> StartedProcesses | None:
        """The processes started early, if any and not used by a group yet."""
        early, self._early = self._early, None
        return early

    def acquire(self, group_name: str) -> None:
        """Add a worker group to the pool."""
        if self._num_groups >= self.max_colocate_count:
            raise ValueError(
                f"worker group {group_name!r}: resource pool {self.name_prefix!r} already has {self._num_groups} groups, "
                f"its max_colocate_count; raise it or put the roles into one process"
            )
        self._num_groups += 1

    def release(self) -> None:
        """Remove a worker group; the last one releases the machines."""
        self._num_groups -= 1
        if self._num_groups == 0:
            self.shutdown()

    def shutdown(self) -> None:
        """Release the machines; workers still running there are killed."""
        for group in self._placement_groups:
            ray.util.remove_placement_group(group)
        self._placement_groups = []
        self._is_ready = False
