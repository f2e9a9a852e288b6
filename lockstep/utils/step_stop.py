"""Giving up a training step before its update, on a signal to the main thread.

    begin ─► generation, rewards, forward passes ─► commit ─► update
             discard, from a signal handler: what the main thread is in decides how it is given up
               a call of a worker in this process   ends by itself, generation early; then StepDiscarded
               an event loop                        its main task is cancelled; then StepDiscarded
               anything else                        StepDiscarded at once

Worker processes that generate a batch end it early when `generation_stopped` is set there (`StopLine`). Everything but that event
belongs to the main thread.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024
CONNECT_TIMEOUT_S = 10.0


class StepDiscarded(KeyboardInterrupt):
    """The step is given up. A KeyboardInterrupt, so that it passes through event loops and `except Exception`."""


generation_stopped = threading.Event()
"""Engines of this process return what they have: the step that it is for is discarded."""

_can_discard = False
_is_pending = False
"""A discard that is raised when the blocks of `given_up_by` are left."""
_was_discarded = False
_blocks: list[Callable[[], None]] = []
_lines: list["StopLine"] = []


def begin() -> None:
    """From here on, the step can be discarded."""
    global _can_discard, _is_pending, _was_discarded
    _can_discard = True
    _is_pending = _was_discarded = False


def commit() -> None:
    """The step can no longer be discarded; raises if it was."""
    global _can_discard
    check()
    _can_discard = False


def keep() -> None:
    """The step can no longer be discarded, even if that was requested: what it has got would be lost."""
    global _can_discard, _is_pending
    _can_discard = _is_pending = False


def end() -> None:
    """The run of this process ends."""
    global _was_discarded
    keep()
    _was_discarded = False
    generation_stopped.clear()


def check() -> None:
    """Raise StepDiscarded if the step was discarded within a block of `given_up_by`."""
    if _is_pending:
        _raise()


def is_given_up() -> bool:
    """Whether the outermost block of `given_up_by`, which this is, was to be cancelled before it could be."""
    return _is_pending and len(_blocks) == 1


def was_discarded() -> bool:
    """Whether StepDiscarded was raised; libraries may have made a plain KeyboardInterrupt of it."""
    return _was_discarded


def discard() -> None:
    """Give up the step, in the main thread; no-op unless it is between `begin` and `commit`."""
    global _is_pending
    if not _can_discard or _is_pending:
        return
    generation_stopped.set()
    for line in _lines:
        line.call()
    if not _blocks:
        _raise()
    _is_pending = True
    _blocks[0]()


def _raise() -> None:
    global _can_discard, _is_pending, _was_discarded
    _can_discard = _is_pending = False
    _was_discarded = True
    raise StepDiscarded


@contextmanager
def given_up_by(cancel: Callable[[], None]) -> Iterator[None]:
    """The main thread's block is not interrupted by `discard`, which calls the outermost `cancel` and takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _blocks.append(cancel)
    try:
        yield
    finally:  # an error of what was given up is not reported
        _blocks.pop()
        if not _blocks:
            check()


def shielded() -> AbstractContextManager[None]:
    """The main thread's block runs to its end."""
    return given_up_by(lambda: None)


class StopLine:
    """Connections of worker processes to the controller, which ends their generation by one byte on each. address: host, port."""

    def __init__(self, host: str) -> None:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((host, 0), family=family, backlog=LISTEN_BACKLOG)
        self.address: tuple[str, int] = (host, self._listening.getsockname()[1])
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, name="stop line", daemon=True).start()
        _lines.append(self)

    def call(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # the worker is gone
                connection.sendall(b"s")

    def close(self) -> None:
        _lines.remove(self)
        for end in (self._listening, *self._connections):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                self._connections.append(self._listening.accept()[0])


def listen(address: tuple[str, int]) -> None:
    """In a worker process: set `generation_stopped` when the controller's line is called; warns if it cannot be reached."""
    try:
        connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        logger.warning(
            "cannot reach the controller at %s port %d (%s): after SIGTERM generation may end too late for a save "
            "(trainer.preemption_grace_s); allow TCP connections between the machines",
            *address,
            error,
        )
        return
    connection.settimeout(None)

    def wait() -> None:
        with suppress(OSError), connection:
            if connection.recv(1):
                generation_stopped.set()

    threading.Thread(target=wait, name="stop line", daemon=True).start()
