"""Ends a run that is stuck (`trainer.on_hang`): first by an exception in the run's thread, then by the end of the process.

the watchdog's verdict ─► HangInterrupt in the run's thread ─► everything is closed ─► HangError: restart, or exit code 3
                                 no reaction for UNWIND_S ─► status.json says why ─► os._exit(3)
"""

import ctypes
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lockstep.single_controller.futures import HangError
from lockstep.utils import main_thread
from lockstep.utils.main_thread import taking_calls
from lockstep.utils.untrusted import printable

EXIT_CODE = 3
UNWIND_S = 15.0
"""How long the run's thread may take to react."""
REPEAT_S = 5.0
"""User code may catch the exception: it is raised again after this time."""
CLOSE_S = 60.0
"""How long the run may take to close what it has opened."""
EXIT_S = 5.0
"""How long `on_exit` may take."""


class HangInterrupt(KeyboardInterrupt):
    """The run is stuck. Passes through what catches failures of rewards, tools and workers, as Ctrl-C does."""


class HangExit:
    """Context manager, entered by the run's thread.

    may_restart: the run may be restarted.
    on_exit:     called with the verdict before the process is ended by force.
    verdict:     set once the run is being ended.
    """

    def __init__(self, may_restart: bool, on_exit: Callable[[str], None]) -> None:
        self.may_restart = may_restart
        self.on_exit = on_exit
        self.verdict: str | None = None
        self._thread = 0
        self._is_unwinding = threading.Event()
        self._is_closed = threading.Event()
        self._calls = taking_calls()

    def __enter__(self) -> "HangExit":
        self._thread = threading.get_ident()
        self._calls.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises HangError in place of whatever the interrupted code raised."""
        self._is_unwinding.set()
        self._is_closed.set()
        self._calls.__exit__(None, None, None)
        if self.verdict is not None and error is not None:
            hang = HangError(self.verdict)
            hang.may_restart = self.may_restart
            raise hang from error

    def unwinding(self, *exc: object) -> None:
        """The run is being closed: do not interrupt it again."""
        self._is_unwinding.set()

    def end(self, verdict: str) -> None:
        """End the run; returns at once."""
        self.verdict = verdict
        threading.Thread(target=self._end, name="hang-exit", daemon=True).start()

    @property
    def _is_main(self) -> bool:
        return self._thread == threading.main_thread().ident

    def _raise(self) -> None:
        if self.verdict is not None and not self._is_unwinding.is_set():
            raise HangInterrupt(self.verdict)

    def _end(self) -> None:
        end = time.monotonic() + UNWIND_S
        while not self._is_unwinding.is_set() and time.monotonic() < end:
            self._interrupt()
            self._is_unwinding.wait(REPEAT_S)
        if self._is_unwinding.is_set() and self._is_closed.wait(CLOSE_S):
            _end_at_exit()
            return
        _bounded(self._before_exit, EXIT_S)  # the folder of the run may be what hangs
        force_exit(f"error: {self.verdict}\n")

    def _before_exit(self) -> None:
        with suppress(Exception):  # whatever happens, the process ends
            self.on_exit(str(self.verdict))

    def _interrupt(self) -> None:
        if self._is_main:
            main_thread.call(self._raise)
        else:  # at the next instruction of Python
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(HangInterrupt))


_exit_code = EXIT_CODE


def set_exit_code(code: int) -> None:
    """How the command ends, after a restart."""
    global _exit_code
    _exit_code = code


def force_exit(message: str, code: int = EXIT_CODE) -> None:
    """End this process now, whatever its threads do, and those that it has started by multiprocessing, such as data loaders."""

    def write() -> None:
        sys.stderr.write(printable(message))
        sys.stdout.flush()
        sys.stderr.flush()

    _bounded(write, 1.0)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _bounded(function: Callable[[], None], timeout_s: float) -> None:
    """Call it in a thread, and wait for at most `timeout_s`."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(timeout_s)


def _end_at_exit() -> None:
    """At its exit, Python waits for threads, such as one of a reward that never returns: do not wait for those that are stuck."""
    stuck = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]

    def leave() -> None:
        if any(thread.is_alive() for thread in stuck):
            force_exit("", _exit_code)

    if stuck:
        threading._register_atexit(leave)  # type: ignore[attr-defined]
