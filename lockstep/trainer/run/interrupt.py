"""Ctrl-C and SIGTERM request a stop after the current step; a second one, or one before training, stops immediately.

With `trainer.preemption_grace_s`, SIGTERM may discard the step instead (`preemption.py`).
"""

import atexit
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lockstep.trainer.run.preemption import Patience
from lockstep.utils import step_stop

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


@contextmanager
def _discarded_is_stop() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        if not step_stop.was_discarded():
            raise
        logger.warning(
            "what was running is discarded: there is no time to finish and save it; a resumed run computes it again"
        )
        raise StopRequested from error


class Interrupt:
    """Context manager that records stop requests instead of raising; raises one that start-up has dropped.

    No-op outside the main thread, which alone gets signals.

    grace_s:   `trainer.preemption_grace_s`: SIGTERM announces the end of the machine after this many seconds, and may come twice.
    by:        who requested the stop, for messages.
    patience:  with grace_s, set by the trainer.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.grace_s = grace_s
        self.requested = False
        self.is_preempted = False
        self.by = "the user"
        self.patience: Patience | None = None
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
        if self.patience is not None:
            self.patience.end()
            step_stop.end()

    def stop(self, by: str) -> None:
        """Request a stop."""
        if not self.requested:
            self.requested, self.by = True, by

    @contextmanager
    def step(self) -> Iterator[None]:
        """A training step: StopRequested if a stop was requested before it, or if it is discarded."""
        if self.requested:
            raise StopRequested
        with _discarded_is_stop():
            if self.patience is not None:
                self.patience.step_begins()
            yield

    @contextmanager
    def validation(self) -> Iterator[None]:
        """A validation: StopRequested if it is discarded."""
        with _discarded_is_stop():
            if self.patience is not None:
                self.patience.validation_begins()
            yield
            step_stop.commit()

    def preempt(self) -> None:
        """The machine goes away in `grace_s`: stop, and discard the step if it would not be finished and saved by then."""
        if self.is_preempted:
            return
        self.is_preempted = True
        self.stop(by="SIGTERM")
        if self.patience is not None:
            self.patience.limit()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self.grace_s is not None:
            self.preempt()
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping after this step and saving a checkpoint; press Ctrl-C again to stop immediately")
