"""Worker processes that call a reward function. If a call hangs or crashes, its row fails and the process is replaced.

    WorkerPool --pickled rows--> worker.py, one call at a time --pickled outcomes--> WorkerPool

A worker is a fresh interpreter that imports the function by name; it shares no threads and no GPU with the trainer.
"""

import contextlib
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

START_TIMEOUT_S = 300.0
"""Time for the interpreter to start and to import the function's module."""
USER_MODULE = "lockstep_user_"
"""Prefix of modules that `load_object` loads from a file."""
HEADER = struct.Struct("!Q")
MAX_BYTES_IN_FLIGHT = 1 << 14
"""Bytes of rows sent to a worker ahead of its replies; small enough for the pipe's buffer, so writing does not block."""
MIN_WRITE_BYTES = 1 << 11
"""Bytes to collect before a write."""


@dataclass(frozen=True)
class WorkerTask:
    """What a worker calls: `load_object(function)(**kwargs, **row)`, after loading the objects in `first`."""

    function: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    first: tuple[str, ...] = ()


class RewardTimeoutError(RuntimeError):
    """A call took longer than `reward_model.timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the reward function took longer than reward_model.timeout_s={timeout_s:g}")


class WorkerDiedError(RuntimeError):
    """The reward function ended its process."""


class WorkerStartError(RuntimeError):
    """The function cannot be loaded in a worker: a configuration error, not a failed row."""


def worker_task(function: Any, first: list[Any]) -> WorkerTask | None:
    """The task for `function`; None if it, or one of `first`, cannot be imported by name in another process."""
    kwargs: dict[str, Any] = {}
    while isinstance(function, partial) and not function.args:
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    references = [_reference(item) for item in (function, *first)]
    if any(reference is None for reference in references):
        return None
    main, *others = (reference for reference in references if reference is not None)
    return WorkerTask(main, kwargs, tuple(others))


def _reference(function: Any) -> str | None:
    name, module_name = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    module = sys.modules.get(module_name)
    if module_name == "__main__" or not name.isidentifier() or getattr(module, name, None) is not function:
        return None
    if module_name.startswith(USER_MODULE):
        return f"{getattr(module, '__file__', '')}:{name}"
    return f"{module_name}:{name}"


class WorkerPool:
    """Calls the function on rows in up to `num_workers` processes; an outcome is a result or an exception."""

    def __init__(self, task: WorkerTask, num_workers: int, timeout_s: float | None) -> None:
        if num_workers < 1:
            raise ValueError(f"reward_model.reward_kwargs.num_workers={num_workers}: must be at least 1")
        self.task = task
        self.timeout_s = timeout_s
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(_Worker(task))
        self._num_workers = num_workers

    def __call__(self, rows: list[dict[str, Any]]) -> list[Any]:
        if self._num_workers == 1 or len(rows) == 1:
            return self._call(rows)
        with ThreadPoolExecutor(self._num_workers, thread_name_prefix="rewards") as threads:
            return [outcome for part in threads.map(lambda row: self._call([row]), rows) for outcome in part]

    def _call(self, rows: list[dict[str, Any]]) -> list[Any]:
        worker = self._idle.get()
        try:
            return worker.call(rows, self.timeout_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Stop the idle workers; the next call starts them again."""
        for _ in range(self._idle.qsize()):
            worker = self._idle.get()
            worker.stop()
            self._idle.put(worker)


class _Worker:
    """One process, started on first use."""

    def __init__(self, task: WorkerTask) -> None:
        self.task = task
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], Any] | None = None

    def call(self, rows: list[dict[str, Any]], timeout_s: float | None) -> list[Any]:
        outcomes: list[Any] = []
        while len(outcomes) < len(rows):
            outcomes += self._outcomes(rows[len(outcomes) :], timeout_s)
        return outcomes

    def _outcomes(self, rows: list[dict[str, Any]], timeout_s: float | None) -> list[Any]:
        """Outcomes in row order, up to the first row that kills the process. `timeout_s` counts from the previous reply."""
        process = self._running()
        replies = _Replies(process)
        messages = map(_message, ((row, timeout_s) for row in rows))
        message = next(messages, b"")
        in_flight: deque[int] = deque()  # bytes per row
        bytes_in_flight = 0
        outcomes: list[Any] = []
        while len(outcomes) < len(rows):
            sent = b""
            try:
                while message and (not in_flight or bytes_in_flight + len(message) <= MAX_BYTES_IN_FLIGHT):
                    in_flight.append(len(message))
                    bytes_in_flight += len(message)
                    sent += message
                    if len(sent) >= MIN_WRITE_BYTES:  # the worker starts while the next rows are pickled
                        _write(process, sent)
                        sent = b""
                    message = next(messages, b"")
                if sent:
                    _write(process, sent)
                reply = replies.next(timeout_s)
            except TimeoutError:
                self.stop()
                assert timeout_s is not None
                return [*outcomes, RewardTimeoutError(timeout_s)]
            except EOFError:
                code = self.stop()
                reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                return [*outcomes, WorkerDiedError(f"the process of the reward function {self.task.function} {reason}")]
            except BaseException:
                self.stop()  # its pending replies belong to rows that are no longer awaited
                raise
            bytes_in_flight -= in_flight.popleft()
            outcomes.append(_outcome(reply))
        return outcomes

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._kill = weakref.finalize(self, _kill_session, process)
        try:
            _write(process, _message(self.task))
            problem = pickle.loads(_Replies(process).next(START_TIMEOUT_S))
        except (TimeoutError, EOFError) as error:
            problem = repr(error)
        if problem is not None:
            self.stop()
            raise WorkerStartError(
                f"the reward function {self.task.function} could not be loaded in a worker process: {problem}. "
                "Set reward_model.timeout_s=null to call it in the trainer's process without a time limit"
            )
        return process

    def stop(self) -> int:
        """Kill the process and its children; return its exit code."""
        process, self._process = self._process, None
        if process is None or self._kill is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)  # to get the exit code of a process that ended by itself
        self._kill()
        return process.returncode


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _message(content: Any) -> bytes:
    payload = pickle.dumps(content)
    return HEADER.pack(len(payload)) + payload


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write `data`; if the process has exited, reading its replies reports it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(data)
        process.stdin.flush()


def _outcome(reply: bytes) -> Any:
    try:
        return pickle.loads(reply)
    except Exception as error:  # noqa: BLE001 (unpickling raises what the classes raise)
        return TypeError(f"the result of the reward function cannot be unpickled: {error!r}")


class _Replies:
    """Reads the messages that a process sends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._file = process.stdout.fileno()
        self._data = b""

    def next(self, timeout_s: float | None) -> bytes:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = HEADER.unpack(self._take(HEADER.size, deadline))
        return self._take(size, deadline)

    def _take(self, size: int, deadline: float | None) -> bytes:
        parts, missing = [self._data], size - len(self._data)
        while missing > 0:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._file], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(self._file, max(missing, 1 << 16))
            if not chunk:
                raise EOFError
            parts.append(chunk)
            missing -= len(chunk)
        data = b"".join(parts)
        self._data = data[size:]
        return data[:size]
