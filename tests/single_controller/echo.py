"""A peer for the processes of tests; imports little."""

import os
import queue
from typing import Any

from lockstep.registry import load_object


class Echo:
    """Returns what it is sent. ("object", reference): the result of calling it. "pid" and "exit" are commands."""

    def __init__(self, closed: str) -> None:
        self._closed = closed
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def push(self, messages: list[Any]) -> None:
        for message in messages:
            if hasattr(message, "fill"):
                message.fill(7)
            elif message == "exit":
                os._exit(3)
            elif message == "pid":
                message = os.getpid()
            elif isinstance(message, tuple):
                message = load_object(message[1])()
            self._outgoing.put(message)

    def pull(self) -> list[Any]:
        return [self._outgoing.get()]

    def close(self) -> None:
        with open(self._closed, "w") as file:
            file.write("closed")
