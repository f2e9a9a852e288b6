"""One worker process as the pool sees it: start it, send rows, receive replies, kill it."""

import functools
import os
import pickle
import select
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.rewards import worker
from lockstep.rewards.errors import WorkerStartError
from lockstep.rewards.monitor import place, printed_frames
from lockstep.utils.child_process import how_it_ended, start_module, wait_or_kill
from lockstep.utils.heartbeat import STOPPED, is_stopped

MAX_BYTES_IN_FLIGHT = 1 << 16
"""Bytes of rows sent to a worker ahead of its replies, as many as a pipe buffers."""
MIN_WRITE_BYTES = 1 << 13
"""Bytes to collect before a write."""
PREFETCH_S = 0.005
"""A worker holds rows for this time, so that it need not wait for the next one."""
STACK_TIMEOUT_S = 2.0
END_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class WorkerTask:
    """What a worker calls: `load_object(function)(**kwargs, **row)`, after loading the objects in `first`."""

    function: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    first: tuple[str, ...] = ()


class WorkerProcess:
    """
    is_ready: the function is loaded.
    rows:     numbers of the rows sent and not yet answered; the first one is being called.
    began:    when its call began: when the row before it was answered. Before `is_ready`: when the process started.
    function_pid: process id of what calls the function; 0 until it says so.
    """

    def __init__(self, task: WorkerTask) -> None:
        self.is_ready = False
        self.rows: deque[int] = deque()
        self._sizes: deque[int] = deque()
        self._bytes_in_flight = 0
        self._seconds_per_call: float | None = None
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.function_pid = 0
        self._stack_fd, fd = os.pipe()
        os.set_blocking(self._stack_fd, False)
        self._stack_lock = threading.Lock()
        start = functools.partial(start_module, worker.__name__, os.getpid(), fd, pass_fds=(fd,), bufsize=0)
        try:
            starting = _starter(os.getpid()).submit(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.process = starting.result()
        except OSError as error:
            os.close(self._stack_fd)
            raise WorkerStartError(
                f"no worker process could be started for the reward function {task.function}: {error}. "
                "Lower reward_model.reward_kwargs.num_workers"
            ) from error
        finally:
            os.close(fd)
        self._end = weakref.finalize(self, _end, self.process, self._stack_fd)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        self.began = time.monotonic()
        self._outgoing += message(task)
        self.flush()

    def has_room(self, size: int, max_rows: int) -> bool:
        """Whether to send another row of `size` bytes now, ahead of the replies to at most `max_rows`."""
        if not self.rows:
            return True
        if len(self.rows) >= max_rows or self._bytes_in_flight + size > MAX_BYTES_IN_FLIGHT:
            return False
        return self._seconds_per_call is not None and len(self.rows) * self._seconds_per_call < PREFETCH_S

    def send(self, row: int, data: bytes) -> None:
        if not self.rows:
            self.began = time.monotonic()
        self.rows.append(row)
        self._sizes.append(len(data))
        self._bytes_in_flight += len(data)
        self._outgoing += data
        if len(self._outgoing) >= MIN_WRITE_BYTES:  # the worker starts while the next rows are pickled
            self.flush()

    def flush(self) -> bool:
        """Write what the pipe takes; True if that is all. If the process has exited, `receive` reports it."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self.stdin, self._outgoing)]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._outgoing.clear()
        return True

    def start_problem(self) -> str | None:
        """Receive the first replies, a pid and a traceback or None. Returns the traceback, or sets `is_ready`."""
        for payload in self._received():
            content = pickle.loads(payload)
            if isinstance(content, int):
                self.function_pid = content
            elif content is not None:
                return str(content)
            else:
                self.is_ready = True
        return None

    def receive(self) -> list[tuple[int, bytes]]:
        """The (row, reply) pairs that have arrived. Raises EOFError if the process has exited."""
        payloads = self._received()
        if not payloads:
            return []
        now = time.monotonic()
        seconds = (now - self.began) / len(payloads)
        previous = self._seconds_per_call
        self._seconds_per_call = seconds if previous is None else (previous + seconds) / 2
        self.began = now
        for _ in payloads:
            self._bytes_in_flight -= self._sizes.popleft()
        return [(self.rows.popleft(), payload) for payload in payloads]

    def _received(self) -> list[bytes]:
        data = os.read(self.stdout, 1 << 16)
        if not data:
            raise EOFError
        self._incoming += data
        payloads = []
        begin = 0
        while len(self._incoming) - begin >= worker.HEADER.size:
            (size,) = worker.HEADER.unpack_from(self._incoming, begin)
            end = begin + worker.HEADER.size + size
            if len(self._incoming) < end:
                break
            payloads.append(bytes(self._incoming[begin + worker.HEADER.size : end]))
            begin = end
        del self._incoming[:begin]
        return payloads

    def place(self) -> str:
        """Where the function is now, in one line; empty if the process does not tell."""
        return place(printed_frames(self.stacks()))

    def stacks(self) -> str:
        """Where the function is now, as faulthandler writes it; empty if the process does not tell."""
        if not self.function_pid:
            return ""
        if is_stopped(self.function_pid):
            return STOPPED
        with self._stack_lock:  # also called by the watchdog
            if not self._end.alive:
                return ""
            with suppress(ProcessLookupError):
                os.kill(self.function_pid, worker.DUMP_STACK)
            dump, timeout_s, poll = b"", STACK_TIMEOUT_S, select.poll()
            poll.register(self._stack_fd, select.POLLIN)
            with suppress(BlockingIOError):
                while poll.poll(1000 * timeout_s) and (data := os.read(self._stack_fd, 1 << 16)):
                    dump, timeout_s = dump + data, 0.05
        return dump.decode(errors="replace")

    def kill(self) -> str:
        """Kill the process and what it started; return how it ended."""
        with self._stack_lock:
            self._end()
        code = self.process.returncode
        number = code - worker.SIGNAL_EXIT_CODE
        return how_it_ended(-number if number in set(signal.Signals) else code)


def message(content: Any) -> bytes:
    payload = pickle.dumps(content)
    return worker.HEADER.pack(len(payload)) + payload


@functools.cache
def _starter(pid: int) -> ThreadPoolExecutor:
    """The thread that starts the workers of process `pid`.

    Workers end with the thread that started them (PR_SET_PDEATHSIG), so it must live as long as the process.
    """
    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, worker.BLOCKED)
    return ThreadPoolExecutor(1, "reward-workers", initializer=block)


def _end(process: subprocess.Popen[bytes], stack_fd: int) -> None:
    process.send_signal(worker.END)
    wait_or_kill(process, END_TIMEOUT_S)
    os.close(stack_fd)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()
