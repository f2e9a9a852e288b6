"""The driver's console: a program of the same user writes to it directly, and a killed driver leaves no file."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.single_controller.ray_backend import console
from lockstep.single_controller.ray_backend.console import DriverConsole

REPOSITORY = Path(__file__).parents[2]
CONSOLE = "from lockstep.single_controller.ray_backend.console import DriverConsole, RemoteConsole;"


def start(code: str, *arguments: str, **variables: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    return subprocess.Popen([sys.executable, "-c", CONSOLE + code, *arguments], env=environment)


def test_program_writes_to_the_drivers_output(capfd: pytest.CaptureFixture[str]) -> None:
    driver = DriverConsole()
    code = "import sys; c = RemoteConsole(chr(0) + sys.argv[1], print); print('hello'); c.send(b'ready'); c.close()"
    program = start(code, driver.address[1:])
    received = b""
    while not driver.ended:
        received += driver.wait(30)
    assert program.wait() == 0 and received == b"ready"
    driver.close()
    assert capfd.readouterr().out == "hello\n"


def test_program_of_another_user_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = DriverConsole()
    monkeypatch.setattr(console, "_peer", lambda connection: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(driver.address)
        assert driver.wait(5) == b"" and stranger.recv(1) == b""
    monkeypatch.undo()
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(driver.address)
        assert driver.wait(5) == b""
        _, files, _, _ = socket.recv_fds(own, 4096, 2)
        assert len(files) == 2
        for file in files:
            os.close(file)
    driver.close()


def test_killed_driver_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    driver = start("import os; DriverConsole(); os.kill(os.getpid(), 9)", TMPDIR=str(tmp_path))
    assert driver.wait() == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
