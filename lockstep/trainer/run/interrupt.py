"""Ctrl-C and SIGTERM request a stop after the current step; a second one, or one before training, stops immediately."""

import atexit
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, Any]], bool]
"""Called with the step (0: validation before training) and its metrics when they are logged; True stops after the step."""


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does; once the program has ended, neither changes its exit code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _early_stop.clear()
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, _stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, _stop)
    hook, sys.unraisablehook = sys.unraisablehook, _without_interrupts(sys.unraisablehook)
    atexit.register(_ignore_signals)
    try:
        yield
    except BaseException as error:
        # Python ends the process by SIGINT if a KeyboardInterrupt passed through `exec` or `eval`, even if it is caught later;
        # the next `exec` resets that.
        exec("")
        # the interrupt made a library raise another error
        if _early_stop.is_set() and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = hook
        for number, handler in previous.items():
            signal.signal(number, handler)


_early_stop = threading.Event()
"""A stop was requested before training. Python drops a KeyboardInterrupt that is raised in a destructor."""


def _stop(number: int, frame: FrameType | None) -> None:
    _early_stop.set()
    raise KeyboardInterrupt


def _without_interrupts(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Do not print a dropped KeyboardInterrupt: `Interrupt` raises it again."""

    def filtered(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)

    return filtered


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class StopRequested(Exception):
    """Stop requested mid-step."""


class Interrupt:
    """Context manager that records stop requests instead of raising; raises one that start-up has dropped.

    No-op outside the main thread, which alone gets signals.

    by: who requested the stop, for messages.
    """

    def __init__(self) -> None:
        self.requested = False
        self.by = "the user"
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            if _early_stop.is_set():
                raise KeyboardInterrupt
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop(self, by: str) -> None:
        """Request a stop."""
        if not self.requested:
            self.requested, self.by = True, by

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping after this step and saving a checkpoint; press Ctrl-C again to stop immediately")
