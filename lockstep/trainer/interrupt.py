"""Ctrl-C and SIGTERM request a stop after the current step; a second one, or one before training, stops immediately."""

import atexit
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does; once the program has ended, neither changes its exit code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    atexit.register(_ignore_signals)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


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
