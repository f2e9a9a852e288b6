"""Calls a function in the main thread from another one, by a signal: also if the main thread waits for a lock or the system.

with taking_calls():                    # the main thread
    ...                                 # call(f) of any thread: f() here, between two instructions; it may raise
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNAL = signal.SIGURG
"""Ignored by default, so that one which comes late does no harm."""

_calls: deque[Callable[[], None]] = deque()


@contextmanager
def taking_calls() -> Iterator[None]:
    """No-op in other threads, which cannot install handlers. May be nested."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(SIGNAL, _run_calls)
    try:
        yield
    finally:
        signal.signal(SIGNAL, previous)


def call(function: Callable[[], None]) -> None:
    """Returns at once; the function is dropped if the main thread takes no calls."""
    if signal.getsignal(SIGNAL) is _run_calls:
        _calls.append(function)
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def _run_calls(number: int, frame: FrameType | None) -> None:
    while _calls:
        _calls.popleft()()
