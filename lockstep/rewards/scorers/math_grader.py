r"""math-verify in a process of its own: its time limits hold in every thread, a runaway expression harms nobody.

math-verify limits its time with SIGALRM, which works in a main thread only, and `\boxed{9^{9^{9}}}` keeps sympy busy
for hours. So this file is also the program of a child process that compares answers in *its* main thread:

    MathGrader.is_equal --{"gold", "answer"} line--> child: parse, verify --{"equal"} line--> bool
"""

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 3
"""math-verify's limit for one parse and for one comparison."""
REPLY_TIMEOUT_S = 60
"""Beyond it the child is taken for stuck and is replaced; covers the child's start."""
CHILD_MEMORY_BYTES = 4 * 1024**3


class MathGrader:
    """Starts the child when it is first asked and anew when it died; one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0

    def is_equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds `answer` equal to `gold`; an answer that outlasts the limits is not."""
        question = json.dumps({"gold": gold, "answer": answer}).encode() + b"\n"
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
        raise RuntimeError(f"the math grader does not start: run `{sys.executable} -P {__file__}` to see why")

    def _read_reply(self, child: subprocess.Popen[bytes], answer: str) -> bool:
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], REPLY_TIMEOUT_S)
        line = child.stdout.readline() if ready else b""
        if line:
            reply = json.loads(line)
            if "error" in reply:
                raise RuntimeError(f"the math grader failed on {answer!r}: {reply['error']}")
            return bool(reply["equal"])
        self._stop()
        if not ready:
            logger.warning("the math grader was stuck on %.200r; the answer counts as wrong", answer)
            return False
        raise RuntimeError(f"the math grader ended with exit code {child.returncode} on {answer[:200]!r}")

    def _running_child(self) -> subprocess.Popen[bytes]:
        # After a fork the pipes belong to the parent process.
        if self._child is None or self._owner_pid != os.getpid() or self._child.poll() is not None:
            # -P: this folder holds a math.py, which must not stand in for the standard one.
            command = [sys.executable, "-P", __file__]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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


def serve() -> None:
    """The child: answer questions from stdin until it closes."""
    import resource
    import signal

    from math_verify import parse, verify

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; the child ends with its stdin
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY_BYTES, CHILD_MEMORY_BYTES))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        try:
            gold, answer = (
                parse(rf"\boxed{{{question[side]}}}", parsing_timeout=STEP_TIMEOUT_S) for side in ("gold", "answer")
            )
            reply: dict[str, bool | str] = {"equal": bool(verify(gold, answer, timeout_seconds=STEP_TIMEOUT_S))}
        except (MemoryError, RecursionError):
            reply = {"equal": False}
        except Exception as error:  # noqa: BLE001 (process boundary: the parent raises it)
            reply = {"error": repr(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
