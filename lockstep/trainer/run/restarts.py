"""Restarts of a run within one command: how many, how long to wait before each, and the record of why.

    RestartError ─► allows? ─► note: log, status.json, restarts.jsonl ─► wait ─► the run again, from its last checkpoint

An exception says its cause, whether its restart is one of `trainer.max_restarts`, and which config keys change (`RestartError`).
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.observability.run_folder import RESTARTS
from lockstep.observability.status_file import StatusFile
from lockstep.observability.watchdog.deadlines import Deadlines
from lockstep.single_controller.futures import HangError, RestartError
from lockstep.utils.progress import phase
from lockstep.utils.untrusted import printable

logger = logging.getLogger(__name__)

BACKOFF_S = (1.0, 5.0, 30.0, 60.0)
"""Pause before the first, second, ... restart in a row without a new checkpoint; the last one repeats."""
POLL_S = 0.2
CAUSE_CHARS = 2000


class Restarts(ExitStack):
    """Lives as long as the command. What must outlive a restart is entered into it: the lock of the folder and `status.json`.

    limit:  `trainer.max_restarts`.
    count:  restarts so far, including those that do not count against the limit.
    step:   the last step that was logged.
    status: None until the folder is locked.
    deadlines: what the watchdog has learnt; None until it is started.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__()
        self.folder = folder
        self.limit = limit
        self.count = 0
        self.step = 0
        self.has_lock = False
        self.status: StatusFile | None = None
        self.deadlines: Deadlines | None = None
        self._num_counted = 0
        self._num_in_a_row = 0
        self._last_checkpoint: Path | None = None

    @property
    def left(self) -> int:
        return self.limit - self._num_counted

    def allows(self, error: RestartError) -> bool:
        if isinstance(error, HangError) and not error.may_restart:
            return False
        return not error.counts or self.left > 0

    def note(self, error: RestartError, checkpoint: Path | None) -> float:
        """Record a restart that is allowed; returns how long to wait before it. checkpoint: where the run goes on."""
        self.count += 1
        self._num_counted += error.counts
        if checkpoint != self._last_checkpoint:  # it has made progress
            self._num_in_a_row = 0
        self._last_checkpoint = checkpoint
        pause_s = BACKOFF_S[min(self._num_in_a_row, len(BACKOFF_S) - 1)] if error.counts else 0.0
        self._num_in_a_row += error.counts
        cause = " ".join(str(error).split())[:CAUSE_CHARS]
        record: dict[str, Any] = {"time": round(time.time(), 3), "step": self.step, "cause": cause}
        if self.status is not None:
            self.status.restarted(record)
        changes = {"changes": dict(error.changes)} if error.changes else {}
        self._append(record | {"counts": error.counts, "wait_s": pause_s} | changes)
        changed = "".join(f", with {name}={value}" for name, value in error.changes.items())
        begin = checkpoint or "the start of the run"
        what = f"restarting the workers from {begin} ({self.left} restarts left){changed} in {pause_s:g} s"
        logger.warning("%s; %s", printable(str(error)).rstrip("."), what)
        return pause_s

    def wait(self, pause_s: float, is_stopped: Callable[[], bool]) -> bool:
        """Wait before a restart; True if the run is to stop instead."""
        end = time.monotonic() + pause_s
        with phase("wait before the restart"):
            while not is_stopped() and (left_s := end - time.monotonic()) > 0:
                time.sleep(min(POLL_S, left_s))
        return is_stopped()

    def _append(self, record: dict[str, Any]) -> None:
        try:
            with open(self.folder / RESTARTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, default=str) + "\n")
        except OSError as error:  # the record must not end the run
            logger.warning("%s cannot be written (%s)", self.folder / RESTARTS, error.strerror or error)
