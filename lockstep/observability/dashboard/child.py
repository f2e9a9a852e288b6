"""`trainer.dashboard=true`: the dashboard of a run, as a child process of its controller. The run never depends on it.

run ─► DashboardChild ─► python -m lockstep.cli dashboard FOLDER --parent PID     ends with the run, also if that is killed
                ▲                     │
                └── its output ───────┘ one line with the address, or why there is none
"""

import logging
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from lockstep.utils.child_process import how_it_ended, start_module

logger = logging.getLogger(__name__)

ADDRESS = "dashboard at "
"""How the line with the address begins."""
CLOSE_TIMEOUT_S = 5.0
"""How long the end of a run waits for a killed process, which may hang in a read of a dead disk."""
AGAIN = "the run goes on; `lockstep dashboard %s` shows it"


class DashboardChild:
    """Context manager: starts the process and logs its address. Whatever goes wrong is a warning.

    process: None if it could not be started.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._is_closing = False
        self._watcher = threading.Thread(target=self._watch, name="dashboard", daemon=True)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "DashboardChild":
        arguments = ("dashboard", self._folder.absolute(), "--port", self._port, "--parent", os.getpid())
        try:
            self.process = start_module(
                "lockstep.cli",
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._watcher.start()
        except (OSError, RuntimeError) as error:  # no memory, processes or threads
            logger.warning(f"the dashboard does not start (%s); {AGAIN}", error, self._folder)
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_closing = True
        if self.process is not None:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_TIMEOUT_S)

    def _watch(self) -> None:
        """Log the address, and the last line of a process that ended by itself."""
        assert self.process is not None and self.process.stdout is not None
        last = ""
        for line in self.process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(ADDRESS):
                logger.info(text)
            last = text or last
        code = self.process.wait()
        if not self._is_closing:
            why = last.removeprefix("lockstep dashboard: ") if code > 0 else how_it_ended(code)
            logger.warning(f"the dashboard has ended (%s); {AGAIN}", why, self._folder)
