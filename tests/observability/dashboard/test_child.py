"""The dashboard beside a run: it starts, it ends with the run, and whatever happens to it the run goes on."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.observability.dashboard.child import DashboardChild
from tests.observability.dashboard.made_runs import make_run


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_serves_the_run_beside_another_program_on_its_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path / "run", steps=2)
    caplog.set_level(logging.INFO)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with DashboardChild(run, port) as child:
            assert child.process is not None
            wait_until(lambda: caplog.messages)
            found = re.fullmatch(r"dashboard at (http://127\.0\.0\.1:(\d+)/) until the run ends", caplog.messages[0])
            assert found is not None and int(found[2]) != port
            with urllib.request.urlopen(f"{found[1]}api/runs") as response:
                assert b'"name":"run"' in response.read()
            assert os.getpriority(os.PRIO_PROCESS, child.process.pid) >= 10
        assert child.process.poll() is not None
    assert len(caplog.messages) == 1


def test_a_killed_dashboard_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DashboardChild(tmp_path, 0) as child:
        assert child.process is not None
        child.process.kill()
        wait_until(lambda: caplog.messages)
    assert caplog.messages == [
        f"the dashboard has ended (was killed by SIGKILL); the run goes on; `lockstep dashboard {tmp_path}` shows it"
    ]


def test_a_missing_package_is_a_warning_with_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    monkeypatch.syspath_prepend(tmp_path)
    with DashboardChild(tmp_path, 0):
        wait_until(lambda: caplog.messages)
    assert "(uvicorn is not installed: pip install 'lockstep-rl[dashboard]'); the run goes on" in caplog.messages[0]


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.observability.dashboard.child.CLOSE_TIMEOUT_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            dashboard = DashboardChild(tmp_path, 0)
            dashboard.process = process
            monkeypatch.setattr(process, "kill", lambda: None)
            dashboard.__exit__()
            assert process.poll() is None
        finally:
            process.terminate()


def test_no_process_can_be_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with DashboardChild(tmp_path, 0) as child:
        assert child.process is None
    assert "the dashboard does not start" in caplog.messages[0]


PARENT = """
import sys, time
from pathlib import Path
from lockstep.observability.dashboard.child import DashboardChild
with DashboardChild(Path(sys.argv[1]), 0) as child:
    print(child.process.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_run_leaves_no_dashboard(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert is_alive(pid)
        finally:
            parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until(lambda: not is_alive(pid))
