"""An object in another process, as a child of this one and on Ray: messages, user code, its end and its death."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.registry import ObjectReferences
from lockstep.single_controller.futures import WorkerDiedError
from lockstep.single_controller.message_process import ChildProcess, MessageProcess
from tests.single_controller.echo import Echo

Start = Callable[[], Any]


@pytest.fixture(params=["child", "ray"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    make = functools.partial(Echo, str(tmp_path / "closed"))
    if request.param == "child":
        return lambda: ChildProcess("echo 1", make)
    pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')
    request.getfixturevalue("ray_cluster")
    from lockstep.single_controller.ray_backend.message_process import RayProcess

    return lambda: RayProcess("echo 1", 1, make)


def receive(process: MessageProcess, count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        messages += process.receive()
    return messages


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_messages_and_user_code_reach_the_process_and_it_ends(start: Start, tmp_path: Path) -> None:
    with ObjectReferences() as objects:
        reference = objects.add(lambda: "called there")
        process = start()
        process.send(["pid", 1, {"a": [2]}])
        process.send([("object", reference), np.arange(3)])
        pid, *rest, array = receive(process, 5)
    assert pid == process.pid != os.getpid()
    assert rest == [1, {"a": [2]}, "called there"] and array.tolist() == [7, 7, 7]
    process.close()
    process.close()
    assert (tmp_path / "closed").read_text() == "closed"
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_a_dead_process_is_reported(start: Start) -> None:
    process = start()
    process.send(["pid"])
    os.kill(receive(process, 1)[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="echo 1"):
        process.receive()
    with pytest.raises(WorkerDiedError, match="echo 1"):
        for _ in range(20):
            process.send([1])
            time.sleep(0.1)
    process.close()


def test_how_a_child_died() -> None:
    process = ChildProcess("echo 1", functools.partial(Echo, ""))
    process.send(["exit"])
    with pytest.raises(WorkerDiedError, match=rf"the process of echo 1 \(pid {process.pid}\) exited with code 3"):
        process.receive()
    process.close()


PARENT = """
import functools, os, signal
from lockstep.single_controller.message_process import ChildProcess
from tests.single_controller.echo import Echo

process = ChildProcess("echo", functools.partial(Echo, {closed!r}))
process.send(["pid"])
print(*process.receive(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_whose_connection_is_gone_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    child = ChildProcess("echo 1", functools.partial(Echo, ""))
    os.close(child._connection.fileno())
    child.close()
    child.close()
    assert child._process.poll() is not None and child._connection.closed
    assert caplog.text.count("the connection to the process of echo 1 was already closed: [Errno 9]") == 1


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    program = PARENT.format(closed=str(tmp_path / "closed"))
    parent = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=False
    )
    assert parent.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while is_alive(int(parent.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(parent.stdout)) and (tmp_path / "closed").read_text() == "closed"
