"""Follows the calls of one batch: logs progress and the first time-out, and stops the run if every call times out."""

import logging
import os
import re
import sysconfig
import time
from collections.abc import Iterable
from itertools import takewhile
from traceback import FrameSummary, extract_tb

from lockstep.rewards.errors import RewardHangError, RewardTimeoutError

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 30.0
MAX_HANGS = 3
"""Times that all calls time out, with no other one ending meanwhile, after which the run stops."""
NUM_USER_FRAMES = 3

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_CALLERS = tuple(os.path.join("lockstep", "rewards", name) for name in ("calls.py", "worker.py"))
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.*)$', re.MULTILINE)


class CallMonitor:
    """
    function:  name of the reward function, for messages.
    num_rows:  rows of the batch.
    timeout_s: `reward_model.timeout_s`.
    """

    def __init__(self, function: str, num_rows: int, timeout_s: float | None) -> None:
        self.function = function
        self.num_rows = num_rows
        self.timeout_s = timeout_s
        self.num_done = 0
        self.report_at = time.monotonic() + REPORT_INTERVAL_S
        self._last_end = 0.0
        self._last_hang = 0.0
        self._num_hangs = 0
        self._warned = False

    def finished(self, count: int = 1) -> None:
        """`count` calls returned or raised."""
        self.num_done += count
        self._last_end = time.monotonic()
        self._num_hangs = 0

    def timed_out(self, row: int, began: float, num_waiting: int, where: str) -> RewardTimeoutError:
        """The outcome of a call that began at `began`; raises RewardHangError if every call times out and rows are waiting.

        Time-outs during which another call ended do not count: the function hangs on some rows only.
        """
        assert self.timeout_s is not None
        self.num_done += 1
        if began >= max(self._last_end, self._last_hang):  # calls that hang at the same time count once
            self._num_hangs += 1
            self._last_hang = time.monotonic()
        if self._num_hangs >= MAX_HANGS and num_waiting:
            raise RewardHangError(
                f"the reward function {self.function} hangs: {self._num_hangs} times in a row, every call took longer than "
                f"reward_model.timeout_s={self.timeout_s:g}, the last one at {where or 'an unknown place'}; "
                f"{num_waiting} of {self.num_rows} rows were waiting. Fix the function, or raise reward_model.timeout_s"
            )
        error = RewardTimeoutError(self.timeout_s, where)
        if not self._warned:
            logger.warning("row %d of %d, %s: %s", row, self.num_rows, self.function, error)
            self._warned = True
        return error

    def report(self, oldest_began: float | None) -> None:
        """Log the progress if it is due; oldest_began: when the longest running call began."""
        now = time.monotonic()
        if now < self.report_at:
            return
        self.report_at = now + REPORT_INTERVAL_S
        running = "" if oldest_began is None else f", one call running for {now - oldest_began:.0f} s"
        logger.info("rewards %d/%d%s", self.num_done, self.num_rows, running)


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
