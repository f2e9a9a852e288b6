"""Which step is finished and which is discarded after a SIGTERM that announces the end of the machine.

    SIGTERM ─► what is left of the step, by the durations of earlier ones, and a save: do they fit into the grace period?
               yes ─► the step goes on, as long as its update and the save still fit
               no  ─► `step_stop.discard`; an update that has begun is finished

The last complete step is saved then.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping

from lockstep.utils import main_thread, step_stop

logger = logging.getLogger(__name__)

MARGIN = 0.1
"""Share of the grace period that is kept for the end of the program."""
UNKNOWN_SAVE = 0.5
"""Share of the grace period that a save is expected to take before there has been one."""
UPDATE = ("adv", "update_critic", "update_actor", "update_weights", "dump_rollouts")
"""Timers of what comes after the last moment at which a step can be discarded."""
NUM_REMEMBERED = 5


class Patience:
    """How long a step or a validation may go on after SIGTERM. Used by the main thread, except `limit`.

    grace_s: time from SIGTERM to the end.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._steps: deque[tuple[float, float]] = deque(maxlen=NUM_REMEMBERED)  # seconds of the step, of its update
        self._validation_s: float | None = None
        self._stage_s: float | None = None
        self._save_s = UNKNOWN_SAVE * grace_s
        self._until: float | None = None
        self._began = time.monotonic()
        self._rest_s: float | None = None
        self._tail_s = 0.0
        self._timer: threading.Timer | None = None

    def step_begins(self) -> None:
        """It can be discarded until `step_stop.commit`."""
        step_s = max((step_s for step_s, _ in self._steps), default=None)
        self._begin(step_s, max((update_s for _, update_s in self._steps), default=0.0))

    def validation_begins(self) -> None:
        self._begin(self._validation_s, 0.0)

    def _begin(self, rest_s: float | None, tail_s: float) -> None:
        self._began = time.monotonic()
        self._rest_s, self._tail_s = rest_s, tail_s
        step_stop.begin()
        if self._until is not None:
            self._arm()

    def learn(self, timing: Mapping[str, float], commit_s: float = 0.0) -> None:
        """The durations of a complete step. commit_s: of the last save, what is not in `timing`."""
        testing_s = timing.get("testing", 0.0)
        if "testing" in timing:
            self._validation_s = testing_s
        if "save_checkpoint" in timing:
            self._stage_s = timing["save_checkpoint"]
        if self._stage_s is not None:
            self._save_s = self._stage_s + commit_s
        self._steps.append((timing["step"] - testing_s, sum(timing.get(name, 0.0) for name in UPDATE)))

    def limit(self) -> None:
        """SIGTERM has come."""
        self._until = time.monotonic() + (1 - MARGIN) * self._grace_s
        logger.warning("SIGTERM: saving a checkpoint within %g s (trainer.preemption_grace_s)", self._grace_s)
        self._arm()

    def wait_s(self) -> float:
        """How long to wait, from now, before what is running is discarded."""
        assert self._until is not None
        now = time.monotonic()
        left_s = self._until - now
        if self._rest_s is None or self._rest_s - (now - self._began) + self._save_s > left_s:
            return 0.0
        return max(0.0, left_s - self._save_s - self._tail_s)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self.wait_s(), main_thread.call, (step_stop.discard,))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
