"""Worker process: loads a reward function and calls it on rows from stdin until stdin closes; see worker_pool.

    pool ── supervisor ── function process ── what the function starts

The supervisor kills the group of the function process when the function process or the pool's process ends. A stop
signal to the whole job is for the trainer: the supervisor blocks it, the function process finishes its call.
"""

import asyncio
import ctypes
import faulthandler
import functools
import inspect
import os
import pickle
import signal
import struct
import sys
import traceback
from contextlib import suppress
from types import FrameType
from typing import Any, BinaryIO

from lockstep.registry import load_object
from lockstep.rewards.errors import Raised

HEADER = struct.Struct("!Q")
CALL_AGAIN = b""
"""Reply to a row during which a stop signal came: processes that the function started may have been killed by it."""

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
END = signal.SIGUSR2
"""Ends the supervisor; also sent by the kernel when the pool's process ends."""
DUMP_STACK = signal.SIGUSR1
BLOCKED = {*STOP_SIGNALS, END, signal.SIGCHLD}
"""Blocked by the pool before it starts a supervisor, so that none is lost during start-up."""
SIGNAL_EXIT_CODE = 128
"""A supervisor exits with this + n if signal n killed the function process, as shells do."""

PR_SET_PDEATHSIG = 1


def main(pool_pid: int, stack_fd: int) -> None:
    _end_with_parent(pool_pid, END)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored one would leave no exit status to wait for
    supervisor_pid = os.getpid()
    function_pid = os.fork()
    if function_pid:
        os._exit(_supervise(function_pid))
    os.setpgid(0, 0)
    _end_with_parent(supervisor_pid, signal.SIGKILL)
    _serve(stack_fd)


def _end_with_parent(parent_pid: int, number: int) -> None:
    """Get signal `number` when the parent ends. Elsewhere than on Linux, a worker only ends when stdin closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before prctl
        os._exit(1)


def _supervise(pid: int) -> int:
    """Wait for the end of the function process or of the pool, kill the group, and return the exit code."""
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # here as well, so that the group exists when it is killed
    os.close(0)
    os.close(1)
    ended, status = 0, 0
    while not ended and signal.sigwait({END, signal.SIGCHLD}) != END:
        ended, status = os.waitpid(pid, os.WNOHANG)
    with suppress(PermissionError, ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else SIGNAL_EXIT_CODE - code


def _serve(stack_fd: int) -> None:
    rows, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the function must not read rows
    os.dup2(2, 1)  # what the function prints goes to stderr
    os.set_inheritable(stack_fd, False)
    faulthandler.register(DUMP_STACK, stack_fd, all_threads=False)
    signals = _StopSignals()
    try:
        task = receive(rows)
    except EOFError:  # the pool ended before it sent the task
        return
    send(replies, pickle.dumps(os.getpid()))
    try:
        for reference in task.first:
            load_object(reference)
        function = load_object(task.function)
    except Exception:  # noqa: BLE001 (process boundary: the pool raises it)
        send(replies, pickle.dumps(traceback.format_exc()))
        return
    send(replies, pickle.dumps(None))
    while True:
        try:
            row, may_repeat = receive(rows)
        except EOFError:
            return
        seen = signals.count
        outcome = attempt(function, {**row, **task.kwargs})
        send(replies, CALL_AGAIN if may_repeat and signals.count > seen else outcome)


class _StopSignals:
    """Counts stop signals instead of ending the process. Processes that the function starts keep the default action."""

    def __init__(self) -> None:
        self.count = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)
        block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOP_SIGNALS)
        unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=self._reset)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    @staticmethod
    def _reset() -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


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
        try:
            payload = pickle.dumps(Raised(error, traceback.format_exc()))
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
    main(*map(int, sys.argv[1:]))
