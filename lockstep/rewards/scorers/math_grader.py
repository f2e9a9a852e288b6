r"""Mathematical equality in a process of its own: time limits hold in every thread, a runaway expression harms nobody.

math-verify limits its time with SIGALRM, which works in a main thread only, and `\boxed{9^{9^{9}}}` keeps sympy busy
for hours. So questions go to a child (`math_grader_child`) that answers them in *its* main thread:

    MathGrader.ask --{"task", "gold", "answer"} line--> child --{"value"} line--> reply
"""

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 60
"""Beyond it the child is taken for stuck and is replaced; covers the child's start."""
COMMAND = [sys.executable, "-P", "-m", "lockstep.rewards.scorers.math_grader_child"]
PACKAGE_ROOT = str(Path(__file__).parents[3])


class Agreement(NamedTuple):
    """plainly: as text or as sympy expressions; within_tolerance: leniently, as numbers within 1e-4."""

    plainly: bool
    within_tolerance: bool


class MathGrader:
    """Starts the child when it is first asked and anew when it died; one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0

    def is_equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds `answer` equal to `gold`; an answer that outlasts the limits is not."""
        return bool(self.ask("equal", gold, answer))

    def is_found(self, gold: str, text: str) -> bool:
        """Whether the answer that math-verify finds in a whole text equals `gold`."""
        return bool(self.ask("found", gold, text))

    def agreement(self, gold: str, answer: str) -> Agreement:
        """How `answer` agrees with `gold` by `lockstep.rewards.scorers.symbolic`."""
        return Agreement(*(self.ask("agreement", gold, answer) or (False, False)))

    def ask(self, task: str, gold: str, answer: str) -> Any:
        """The child's value for a task; None where it was stuck."""
        question = json.dumps({"task": task, "gold": gold, "answer": answer}).encode() + b"\n"
        with self._lock:
            # A stuck or killed child costs this answer its point; two broken pipes in a row are a broken installation.
            for _ in range(2):
                child = self._running_child()
                try:
                    assert child.stdin is not None
                    child.stdin.write(question)
                    child.stdin.flush()
                except BrokenPipeError:
                    self._stop()
                    continue
                return self._read_reply(child, answer)
        raise RuntimeError(f"the math grader does not start: run `{' '.join(COMMAND)}` to see why")

    def _read_reply(self, child: subprocess.Popen[bytes], answer: str) -> Any:
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], REPLY_TIMEOUT_S)
        line = child.stdout.readline() if ready else b""
        if line:
            reply = json.loads(line)
            if "error" in reply:
                raise RuntimeError(f"the math grader failed on {answer[:200]!r}: {reply['error']}")
            return reply["value"]
        self._stop()
        if not ready:
            logger.warning("the math grader was stuck on %.200r; the answer counts as wrong", answer)
            return None
        raise RuntimeError(f"the math grader ended with exit code {child.returncode} on {answer[:200]!r}")

    def _running_child(self) -> subprocess.Popen[bytes]:
        # After a fork the pipes belong to the parent process.
        if self._child is None or self._owner_pid != os.getpid() or self._child.poll() is not None:
            paths = [PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
            self._child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._owner_pid = os.getpid()
        return self._child

    def _stop(self) -> None:
        if self._child is not None and self._owner_pid == os.getpid():
            self._child.kill()
            self._child.wait()
        self._child = None

    def close(self) -> None:
        """End the child; it starts again with the next question."""
        with self._lock:
            self._stop()


GRADER = MathGrader()
"""The one grader of this process."""
atexit.register(GRADER.close)
