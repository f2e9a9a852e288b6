"""Worker process: loads a reward function and calls it on rows from stdin until stdin closes; see worker_pool."""

import asyncio
import inspect
import os
import pickle
import signal
import struct
import traceback
from typing import Any, BinaryIO

from lockstep.registry import load_object

HEADER = struct.Struct("!Q")
ORPHAN_GRACE_S = 10.0
"""A call that hangs is killed by SIGALRM this long after its limit, in case the parent is gone."""


def main() -> None:
    rows, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the function must not read rows
    os.dup2(2, 1)  # what the function prints goes to stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; a worker exits when stdin closes
    task = receive(rows)
    try:
        for reference in task.first:
            load_object(reference)
        function = load_object(task.function)
    except Exception:  # noqa: BLE001 (process boundary: the parent raises it)
        send(replies, pickle.dumps(traceback.format_exc()))
        return
    send(replies, pickle.dumps(None))
    while True:
        try:
            row, timeout_s = receive(rows)
        except EOFError:
            return
        if timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
        outcome = attempt(function, {**row, **task.kwargs})
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, outcome)


def attempt(function: Any, arguments: dict[str, Any]) -> bytes:
    """Pickle the result, or the exception with its traceback as a note; as text if it cannot be pickled."""
    try:
        result = function(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return pickle.dumps(result)
    except SystemExit as error:
        return pickle.dumps(RuntimeError(f"the reward function called exit({error.code!r})"))
    except Exception as error:  # noqa: BLE001 (boundary to user code; the manager reports it)
        error.add_note(traceback.format_exc())
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)
            return payload
        except Exception:  # noqa: BLE001 (an exception that cannot be pickled)
            return pickle.dumps(RuntimeError(f"{error!r}\n{traceback.format_exc()}"))


def receive(rows: BinaryIO) -> Any:
    header = rows.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(rows.read(*HEADER.unpack(header)))


def send(replies: BinaryIO, payload: bytes) -> None:
    replies.write(HEADER.pack(len(payload)) + payload)
    replies.flush()


if __name__ == "__main__":
    main()
