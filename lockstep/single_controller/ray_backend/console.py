"""Share the driver's console with another process on the same machine.

    driver ── stdout and stderr as file descriptors ──► program      writes to the terminal, pipe or file directly
    driver ◄──────────── bytes: short messages ───────► program

Output is not relayed, so terminal size, colours and line order are as if the program ran in the terminal.
"""

import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

CHUNK = 4096


class DriverConsole:
    """The driver's side. One program may open a `RemoteConsole` with `address`."""

    def __init__(self) -> None:
        self.address = f"\0lockstep-{secrets.token_hex(16)}"  # abstract: no file is left if the driver is killed
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.address)
        self._listening.listen(1)
        self._connection: socket.socket | None = None
        self._copies: list[threading.Thread] = []
        self._ended = False

    def wait(self, timeout_s: float) -> bytes:
        """The program's messages; empty on timeout or if the program has ended."""
        source = self._connection or self._listening
        if self._ended or not select.select([source], [], [], timeout_s)[0]:
            return b""
        if self._connection is None:
            connection, _ = self._listening.accept()
            if _peer(connection) not in (os.getuid(), 0):  # an abstract address has no file permissions
                connection.close()
                return b""
            self._connection = connection
            self._send_streams(connection)
            return b""
        messages = self._connection.recv(CHUNK)
        self._ended = not messages
        return messages

    @property
    def ended(self) -> bool:
        """Whether the program has closed the console."""
        return self._ended

    def send(self, message: bytes) -> None:
        if self._connection is not None and not self._ended:
            try:
                self._connection.sendall(message)
            except OSError:  # the program has ended
                self._ended = True

    def close(self) -> None:
        """Call after the program has ended."""
        for end in (self._connection, self._listening):
            if end is not None:
                end.close()
        for copy in self._copies:
            copy.join(timeout=1.0)

    def _send_streams(self, connection: socket.socket) -> None:
        files = []
        close_after = []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            try:
                files.append(stream.fileno())
            except (OSError, AttributeError, ValueError):  # no file descriptor, as in a notebook
                reading, writing = os.pipe()
                self._copies.append(_start(_copy, reading, stream))
                files.append(writing)
                close_after.append(writing)
        encodings = [(stream.encoding or "utf-8", stream.errors or "replace") for stream in (sys.stdout, sys.stderr)]
        socket.send_fds(connection, [json.dumps(encodings).encode()], files)
        for file in close_after:
            os.close(file)


class RemoteConsole:
    """The program's side: redirects its stdout and stderr to the driver's.

    on_message: called with the driver's messages, in a thread.
    """

    def __init__(self, address: str, on_message: Callable[[bytes], None]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        encodings, files, _, _ = socket.recv_fds(self._connection, CHUNK, 2)
        opened = []
        for number, file, (encoding, errors) in zip((1, 2), files, json.loads(encodings)):
            os.dup2(file, number)  # for child processes and C libraries
            os.close(file)
            opened.append(open(number, "w", buffering=1, encoding=encoding, errors=errors, closefd=False))  # noqa: SIM115
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = opened  # type: ignore[misc]
        _start(self._listen, on_message)

    def _listen(self, on_message: Callable[[bytes], None]) -> None:
        try:
            while message := self._connection.recv(CHUNK):
                on_message(message)
        except OSError:  # closed
            return

    def send(self, message: bytes) -> None:
        try:
            self._connection.sendall(message)
        except OSError:  # the driver is gone; Ray ends this process
            return

    def close(self) -> None:
        """Flush the streams and signal the end."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._connection.shutdown(socket.SHUT_RDWR)


def _peer(connection: socket.socket) -> int:
    """User id of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _copy(reading: int, stream: TextIO) -> None:
    with open(reading, encoding=stream.encoding or "utf-8", errors="replace", newline="") as pieces:
        for line in pieces:
            stream.write(line)
            stream.flush()


def _start(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
