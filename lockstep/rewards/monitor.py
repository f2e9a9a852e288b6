"""Follows the calls of one batch: reports progress, logs the first time-out, and stops the run after too many."""

import logging
import os
import re
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from traceback import FrameSummary, extract_tb
from typing import Any

from lockstep.rewards.errors import RewardHangError, RewardTimeoutError
from lockstep.utils.progress import count

logger = logging.getLogger(__name__)

MAX_HANGS = 3
"""Times that all calls time out, with no other one ending meanwhile, after which the run stops."""
MAX_TIMEOUTS = 10
"""Time-outs of one batch, of whatever rows, after which the run stops."""
NUM_USER_FRAMES = 3
NUM_CHARS = 60
"""Characters of a response in a message."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_CALLERS = tuple(os.path.join("lockstep", "rewards", name) for name in ("calls.py", "functions.py", "worker.py"))
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.*)$', re.MULTILINE)


class CallMonitor:
    """
    function:  name of the reward function, for messages.
    rows:      arguments of each call.
    timeout_s: `reward_model.timeout_s`.
    """

    def __init__(self, function: str, rows: Sequence[Mapping[str, Any]], timeout_s: float | None) -> None:
        self.function = function
        self.rows = rows
        self.num_rows = len(rows)
        self.timeout_s = timeout_s
        self.num_done = 0
        self._last_end = 0.0
        self._last_hang = 0.0
        self._num_hangs = 0
        self._num_timeouts = 0

    def call(self, row: int) -> str:
        """Which call is running, for the watchdog."""
        return f"{self.function}, row {row} of {self.num_rows}"

    def finished(self, count: int = 1) -> None:
        """`count` calls returned or raised."""
        self.num_done += count
        self._last_end = time.monotonic()
        self._num_hangs = 0

    def timed_out(self, row: int, began: float, num_waiting: int, where: str) -> RewardTimeoutError:
        """The outcome of a call that began at `began`.

        Raises RewardHangError if rows are waiting, and every call times out or the batch has had MAX_TIMEOUTS. Time-outs during
        which another call ended count only for the latter: the function hangs on some rows only.
        """
        assert self.timeout_s is not None
        self.num_done += 1
        self._num_timeouts += 1
        at = f"at {where or 'an unknown place'}; {num_waiting} of {self.num_rows} rows were waiting"
        fix = f"Sample: {self._sample(row)}. Fix the function, or set reward_model.timeout_s"
        if began >= max(self._last_end, self._last_hang):  # calls that hang at the same time count once
            self._num_hangs += 1
            self._last_hang = time.monotonic()
        if self._num_hangs >= MAX_HANGS and num_waiting:
            raise RewardHangError(
                f"the reward function {self.function} hangs: {self._num_hangs} times in a row, every call took longer than "
                f"reward_model.timeout_s={self.timeout_s:g}, the last one {at}. {fix}"
            )
        if self._num_timeouts >= MAX_TIMEOUTS and num_waiting:
            raise RewardHangError(
                f"the reward function {self.function} hangs on too many samples: {self._num_timeouts} calls of this batch took "
                f"longer than reward_model.timeout_s={self.timeout_s:g}, the last one {at}. {fix}"
            )
        error = RewardTimeoutError(self.timeout_s, where)
        if self._num_timeouts == 1:
            logger.warning("%s, %s: %s", self._sample(row), self.function, error)
        return error

    def _sample(self, row: int) -> str:
        """Row number and, as far as they are known, data source, index and the beginning of the response."""
        arguments = self.rows[row]
        parts = [f"row {row} of {self.num_rows}"]
        if "data_source" in arguments:
            parts.append(f"data_source {arguments['data_source']!r}")
        if (index := (arguments.get("extra_info") or {}).get("index")) is not None:
            parts.append(f"extra_info.index {index}")
        if response := arguments.get("solution_str"):
            parts.append(f"response {response[:NUM_CHARS]!r}{'…' if len(response) > NUM_CHARS else ''}")
        return ", ".join(parts)

    def report(self, oldest_began: float | None) -> None:
        """oldest_began: when the longest running call began."""
        count(self.num_done, self.num_rows, call_began=oldest_began)


def place(frames: Iterable[FrameSummary]) -> str:
    """The innermost frame of the reward function and the innermost ones in user code, in one line.

    frames: innermost first; those of our call and outside it are left out.
    """
    called = list(takewhile(lambda frame: not frame.filename.endswith(_CALLERS), frames))
    shown = called[:1] + [frame for frame in called[1:] if not _is_library(frame.filename)][:NUM_USER_FRAMES]
    return ", called from ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in shown)


def raised_at(error: BaseException) -> str:
    """Where the reward function raised `error`; from the note with the traceback if it was raised in a worker."""
    frames = list(extract_tb(error.__traceback__)) or printed_frames("".join(getattr(error, "__notes__", [])))
    return place(reversed(frames))


def printed_frames(text: str) -> list[FrameSummary]:
    """The frames in a dump of faulthandler or in a traceback, in the order of the text."""
    return [FrameSummary(m["file"], int(m["line"]), m["name"], lookup_line=False) for m in _FRAME.finditer(text)]


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file
