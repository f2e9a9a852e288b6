r"""Mathematical equality in a child process, so that time limits work from any thread and a hang cannot block the trainer.

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
"""After this time the child counts as stuck and is replaced; includes the child's start-up."""
COMMAND = [sys.executable, "-P", "-m", "lockstep.rewards.scorers.math_grader_child"]
PACKAGE_ROOT = str(Path(__file__).parents[3])


class Agreement(NamedTuple):
    """strict: equal as text or as sympy expressions; within_tolerance: also as numbers within 1e-4."""

    strict: bool
    within_tolerance: bool


class MathGrader:
    """Starts the child on first use and restarts it if it died; one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0

    def is_equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds `answer` equal to `gold`; False on timeout."""
        return bool(self.ask("equal", gold, answer))

    def is_found(self, gold: str, text: str) -> bool:
        """Whether the answer that math-verify extracts from a whole text equals `gold`."""
        return bool(self.ask("found", gold, text))

    def agreement(self, gold: str, answer: str) -> Agreement:
        """Compare `answer` with `gold` by the rules of `lockstep.rewards.scorers.symbolic`."""
        return Agreement(*(self.ask("agreement", gold, answer) or (False, False)))

    def ask(self, task: str, gold: str, answer: str) -> Any:
        """The child's value for a task; None if it was stuck."""
        question = json.dumps({"task": task, "gold": gold, "answer": answer}).encode() + b"\n"
        with self._lock:
            # Restart once on a broken pipe; two in a row mean a broken installation.
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
        raise RuntimeError(f"the math grader failed to start: run `{' '.join(COMMAND)}` to see why")

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
            logger.warning("the math grader timed out on %.200r; the answer counts as wrong", answer)
            return None
        raise RuntimeError(f"the math grader exited with code {child.returncode} on {answer[:200]!r}")

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
        """Stop the child; the next question starts it again."""
        with self._lock:
            self._stop()


GRADER = MathGrader()
"""The grader of this process."""
atexit.register(GRADER.close)
