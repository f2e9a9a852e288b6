"""Repairs the rollout while the trainer keeps its state.

    WorkerDiedError    the rollout's own processes are started again: model, weight group, weights of the current policy, proof
    WeightsLostError   all servers were restarted: they get the weights of the current policy, proof

What was being generated is generated again, with the same seeds.
"""

import logging

from lockstep.single_controller import WorkerDiedError
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.trainer.ppo.worker_groups import WorkerGroups
from lockstep.utils.progress import phase
from lockstep.weight_sync import WeightSync

logger = logging.getLogger(__name__)

MAX_IN_A_ROW = 3
"""Repairs without a complete step in between; a further failure is that of the run, for `trainer.max_restarts`."""


class RolloutRepair:
    """count: repairs so far."""

    def __init__(self, workers: WorkerGroups, weight_sync: WeightSync | None, sampling: Sampling) -> None:
        self.workers = workers
        self.weight_sync = weight_sync
        self.sampling = sampling
        self.count = 0
        self._num_in_a_row = 0

    def step_is_complete(self) -> None:
        self._num_in_a_row = 0

    def repair(self, error: Exception, version: int) -> None:
        """Make the rollout generate with the weights of `version` again; raises `error` if that is not possible."""
        died = isinstance(error, WorkerDiedError)
        if self.weight_sync is None or self._num_in_a_row >= MAX_IN_A_ROW:
            raise error
        if died and not self.workers.only_rollout_died():
            raise error
        self._num_in_a_row += 1
        self.count += 1
        what = "starting the rollout's processes again" if died else "sending the weights again"
        logger.warning("%s; %s", error, what)
        try:
            with phase("repair the rollout"):
                if died:
                    self.workers.restart_rollout()
                    self.weight_sync.reconnect()
                self.sampling.forget_failures()
                self.weight_sync.run(version)
        except ValueError as failure:  # no machine for the processes
            logger.warning("the rollout's processes cannot be started again: %s", failure)
            raise error from failure
