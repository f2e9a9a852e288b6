"""Ctrl-C and SIGTERM request a stop after the current step; a second Ctrl-C stops immediately."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class StopRequested(Exception):
    """Stop requested mid-step."""


class Interrupt:
    """Context manager that records stop requests instead of raising. No-op outside the main thread, which alone gets signals."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping after this step and saving a checkpoint; press Ctrl-C again to stop immediately")
