"""`status.json` in a run's folder: what the run is doing now, written by a thread of its controller. Format: docs/run_folder.md.

    phases of utils/progress.py ─┐
    steps that are logged       ─┤
    heartbeats of workers       ─┼─► StatusFile ─► status.json ─► read_status
    how the run ended           ─┘

The file is replaced at most once per second, if something has changed, and at least every `HEARTBEAT_S` while the run lives. What
goes wrong here (a full disk, a deleted folder) is logged once and never reaches the run.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from lockstep.observability.memory_warning import CHECK_S, MemoryWarning
from lockstep.observability.run_folder import STATUS
from lockstep.observability.step_times import StepTimes
from lockstep.observability.tracker import Metrics
from lockstep.utils.files import atomic_write_bytes
from lockstep.utils.progress import current
from lockstep.utils.untrusted import JSON_ERRORS

logger = logging.getLogger(__name__)

State = Literal["running", "finished", "stopped", "failed"]
INTERVAL_S = 1.0
HEARTBEAT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
"""How long the end of a run waits for its last status, if the disk does not answer."""
MOST_BYTES = 1_000_000
"""A larger status.json was not written by us."""
REASON_CHARS = 2000
MOST_RESTARTS = 20
"""Restarts that the status lists: the last ones; restarts.jsonl has all."""


class StatusFile:
    """Context manager around a run: `running` inside, and at the end what `ended` has said, or the exception that passes through.

    step: the last one that was logged. total_steps: of the whole run; None if it is not known yet.
    """

    watch: Callable[[], dict[str, Any]] | None = None
    """The watchdog's part of the status."""

    def __init__(self, folder: Path, step: int, total_steps: int | None) -> None:
        self._path = folder / STATUS
        self._head = {"pid": os.getpid(), "host": socket.gethostname(), "started": round(time.time(), 3)}
        self._step, self._total_steps = step, total_steps
        self._step_times = StepTimes()
        self._left_s: float | None = None
        self._logged_at = time.monotonic()
        self._state: State = "running"
        self._reason: str | None = None
        self._end: tuple[State, str | None] | None = None
        self._has_failed = False
        self._restarts: list[dict[str, Any]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def resume(self, step: int, total_steps: int) -> None:
        """The run goes on after `step`."""
        self._step, self._total_steps = step, total_steps

    def log(self, metrics: Metrics, step: int) -> None:
        """A step is complete."""
        if "timing_s/step" in metrics:  # not that of a validation before training
            self._left_s = self._step_times.seconds_left(metrics, step, self._total_steps)
            self._logged_at = time.monotonic()
        self._step = step

    def restarted(self, restart: dict[str, Any]) -> None:
        """The run goes on from its last checkpoint. restart: time, step, cause."""
        self._restarts.append(restart)
        self._end = None
        self._left_s = None

    def ended(self, state: State, reason: str | None = None) -> None:
        """How the run ends; written when the context is left, so that a finished run has also closed everything inside."""
        self._end = state, reason

    def abandon(self, reason: str) -> None:
        """The process ends now, without leaving the context: write that the run has failed."""
        self._state, self._reason = "failed", " ".join(reason.split())[:REASON_CHARS]
        self._is_over.set()
        self._write(self._status())

    def __enter__(self) -> "StatusFile":
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            logger.warning("%s is not written: %s", self._path, error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.ended("stopped", "stopped by the user, without a checkpoint of the step")
        elif error is not None and (self._end is None or self._end[0] != "failed"):
            self.ended("failed", f"{type(error).__name__}: {error}")
        elif self._end is None and self._total_steps is not None and self._step >= self._total_steps:
            self.ended("finished")
        elif self._end is None:
            self.ended("stopped", f"ended after step {self._step}, before its last one")
        assert self._end is not None
        state, reason = self._end
        self._reason = None if reason is None else " ".join(reason.split())[:REASON_CHARS]
        self._state = state
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        written: dict[str, Any] = {}
        written_at = float("-inf")
        memory = MemoryWarning()
        memory_checked_at = float("-inf")
        wait_s = 0.0
        while not self._is_over.wait(wait_s):
            now = time.monotonic()
            wait_s = INTERVAL_S
            with self._guarded():
                status = self._status()
                if status != written or now - written_at >= HEARTBEAT_S:
                    self._write(status)
                    written, written_at = status, now
            if now - memory_checked_at >= CHECK_S:
                memory_checked_at = now
                with self._guarded():
                    memory.check()
        with self._guarded():
            self._write(self._status())

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Log the first error, and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the thread must live as long as the run
            if not self._has_failed:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                logger.warning("%s cannot be written (%s); the run goes on without it", self._path, reason)
            self._has_failed = True

    def _status(self) -> dict[str, Any]:
        """All but what changes with the clock."""
        offset = time.time() - time.monotonic()
        is_running = self._state == "running"
        phases = [
            [
                {
                    "name": phase.name,
                    "began": round(phase.began + offset, 1),
                    "done": phase.done,
                    "total": phase.total,
                    "unit": phase.unit,
                }
                for phase in own
            ]
            for own in (current() if is_running else ())
        ]
        return self._head | {
            "state": self._state,
            "reason": self._reason,
            "step": self._step,
            "total_steps": self._total_steps,
            "phases": phases,
            "restarts": self._restarts[-MOST_RESTARTS:],
            "step_seconds": [round(seconds, 3) for seconds in list(self._step_times.durations)],
        }

    def _write(self, status: dict[str, Any]) -> None:
        left = self._left_s if status["state"] == "running" else None
        if left is not None:
            left = round(max(0.0, left - (time.monotonic() - self._logged_at)), 1)
        watched = self.watch() if self.watch is not None else {"workers": [], "stuck": None}
        text = json.dumps(status | watched | {"time": round(time.time(), 3), "seconds_left": left}, ensure_ascii=True)
        atomic_write_bytes(self._path, text.encode() + b"\n", sync=False)


def read_status(folder: Path) -> dict[str, Any] | None:
    """The status of a run; None if it has none, or none that can be read."""
    return read_json(folder / STATUS)


def read_json(path: Path) -> dict[str, Any] | None:
    """A small JSON object of a run's folder; None if there is none that can be read."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(MOST_BYTES))
    except (OSError, *JSON_ERRORS):
        return None
    return content if isinstance(content, dict) else None
