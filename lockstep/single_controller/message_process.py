"""One object in another process, with a stream of messages each way.

    controller                     the object in the process
    send(messages)  ─────────────► push(messages)
    receive()       ◄───────────── pull(), which waits for some
    close()         ─────────────► close()

`ChildProcess` is a child of this process; `ray_backend/message_process.py` has the same on a Ray cluster.
"""

import logging
import os
import re
import socket
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lockstep.single_controller.environment import ProcessEnvironment
from lockstep.single_controller.futures import WorkerDiedError
from lockstep.utils import heartbeat
from lockstep.utils.child_process import how_it_ended, start_module, wait_or_kill

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""How long a process may take to end."""


def role_and_number(name: str) -> tuple[str, int]:
    """Of a name like "agent worker 1" or "agent worker 1 of 4"; 0 without a number."""
    found = re.fullmatch(r"(.+?) (\d+)( of \d+)?", name)
    return (name, 0) if found is None else (found[1], int(found[2]))


class Peer(Protocol):
    """What runs in the process. Its constructor must not fail: it reports problems as messages."""

    def push(self, messages: list[Any]) -> None:
        """Take messages; returns at once."""

    def pull(self) -> list[Any]:
        """Wait for messages to the controller."""

    def close(self) -> None:
        """End what runs."""


class MessageProcess(ABC):
    """`send` and `receive` are called by one thread each; both raise WorkerDiedError if the process is dead.

    name: for messages.
    """

    name: str

    @abstractmethod
    def send(self, messages: list[Any]) -> None: ...

    @abstractmethod
    def receive(self) -> list[Any]:
        """Wait for messages."""

    @abstractmethod
    def close(self) -> None:
        """End the process, gracefully if it does so in CLOSE_TIMEOUT_S; a second call is a no-op."""


class ChildProcess(MessageProcess):
    """Ends with this process, also if that is killed: its connection breaks.

    name:      for error messages and reports.
    make_peer: called in the process.
    """

    def __init__(self, name: str, make_peer: Callable[[], Peer]) -> None:
        self.name = name
        self._connection, remote = Pipe()
        with remote:
            self._process = start_module(__name__, remote.fileno(), pass_fds=(remote.fileno(),))
        with suppress(OSError):  # `receive` reports a process that died at once
            self._connection.send(ProcessEnvironment.capture(with_variables=True))
            self._connection.send((heartbeat.current_link(), *role_and_number(name)))
            self._connection.send(make_peer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, messages: list[Any]) -> None:
        try:
            self._connection.send(messages)
        except OSError as error:
            raise WorkerDiedError(self._how_it_died()) from error

    def receive(self) -> list[Any]:
        try:
            messages: list[Any] = self._connection.recv()
            return messages
        except (OSError, EOFError) as error:
            raise WorkerDiedError(self._how_it_died()) from error

    def close(self) -> None:
        if self._connection.closed:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as stream:
            stream.shutdown(socket.SHUT_WR)  # the child reads the end, also if a message was cut
        wait_or_kill(self._process, CLOSE_TIMEOUT_S)
        try:
            self._connection.close()
        except OSError as error:  # the process has ended: this must not fail the run
            logger.warning("the connection to the process of %s was already closed: %s", self.name, error)

    def _how_it_died(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        code = self._process.returncode
        how = "closed its connection" if code is None else how_it_ended(code)
        return f"the process of {self.name} (pid {self.pid}) {how}"


def main() -> None:
    """The child. Its connection is the file descriptor that the last argument names."""
    connection = Connection(int(sys.argv[-1]))
    del os.environ["PYTHONPATH"]  # set for this process alone
    connection.recv().apply()
    heartbeat.start(*connection.recv())
    peer: Peer = connection.recv()()
    forward = threading.Thread(target=_forward, args=(connection, peer), daemon=True)
    forward.start()
    with suppress(OSError):
        while True:
            connection.send(peer.pull())
    forward.join()


def _forward(connection: Connection, peer: Peer) -> None:
    """Messages of the controller to the object, until the connection ends; then ends the process."""
    code = 0
    try:
        with suppress(EOFError, OSError):
            while True:
                peer.push(connection.recv())
        peer.close()
    except BaseException:  # noqa: BLE001 - a process that takes no messages would leave the controller waiting
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at a normal exit, Python would wait for threads, such as those of tools that hang


if __name__ == "__main__":
    main()
