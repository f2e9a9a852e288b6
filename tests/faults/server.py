"""Forks training runs from a process that has imported torch and lockstep once, since importing takes longer than a run.

"ready" on stdout; stdin: a job per line ─► fork ─► {"pid": …} … {"code": …} on stdout
"""

import atexit
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import lockstep.data.loader
import lockstep.demo.main_demo
import lockstep.trainer.ppo.task_runner  # noqa: F401
from lockstep.trainer import main_ppo
from tests.faults.shim import Injection, install


def main() -> int:
    """Returns in the server when stdin is closed, and in each forked run with its exit code."""
    gc.freeze()  # no run scans the modules for garbage
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return run(job)
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)
    return 0


def run(job: dict[str, Any]) -> int:
    """A run in its own session. The server's environment is visible in /proc, which marks the process as one of a test."""
    os.setsid()
    os.chdir(job["folder"])
    os.environ.update(job["variables"])
    tempfile.tempdir = None
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "stdout.txt", WRITE), (2, "stderr.txt", WRITE)):
        os.dup2(os.open(name, flags, 0o644), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job["memory_mb"] is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (job["memory_mb"] << 20), resource.RLIM_INFINITY))
    if job["injection"] is not None:
        install(Injection(**job["injection"]))
    code = main_ppo.main(job["overrides"])
    if not job["teardown"]:
        threading._shutdown()  # what the interpreter does before it frees the modules, which takes as long as a tiny run
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

if __name__ == "__main__":
    sys.exit(main())
