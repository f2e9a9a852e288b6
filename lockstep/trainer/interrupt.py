"""Ctrl-C and SIGTERM ask for a stop after the current step; a second Ctrl-C stops at once."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class StopRequested(Exception):
    """The user wants no more, in the middle of a step."""


class Interrupt:
    """While entered, notes a request to stop instead of raising. Only the main thread can catch signals; elsewhere it is inert."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping after this step (a training step is saved first); press Ctrl-C again to stop at once")
