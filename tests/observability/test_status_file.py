"""status.json: what it says about a run, and that a bad disk does not reach the run."""

import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability import status_file
from lockstep.observability.run_folder import STATUS
from lockstep.observability.status_file import StatusFile, read_status
from lockstep.utils.progress import count, phase


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "INTERVAL_S", 0.01)


def wait_for(folder: Path, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    while True:
        status = read_status(folder)
        if status is not None and condition(status):
            return status
        time.sleep(0.005)


def test_what_a_run_is_doing(tmp_path: Path) -> None:
    before = time.time()
    with StatusFile(tmp_path, 3, 10) as status, phase("generate"):
        count(2, 8, "sequences")
        found = wait_for(tmp_path, lambda found: bool(found["phases"]))
        ((generate,),) = found["phases"]
        assert (found["pid"], found["host"], found["state"]) == (os.getpid(), socket.gethostname(), "running")
        assert (found["step"], found["total_steps"], found["seconds_left"]) == (3, 10, None)
        assert (generate["name"], generate["done"], generate["total"], generate["unit"]) == (
            "generate",
            2,
            8,
            "sequences",
        )
        assert before - 0.1 <= generate["began"] <= found["time"] + 0.1 and before <= found["started"] + 0.1
        with phase("rewards"):
            wait_for(tmp_path, lambda found: [one["name"] for one in found["phases"][0]] == ["generate", "rewards"])
        status.log({"val-core/x": 1.0}, 3)
        status.log({"timing_s/step": 2.0}, 4)
        found = wait_for(tmp_path, lambda found: found["step"] == 4)
        assert found["step_seconds"] == [2.0] and 10 < found["seconds_left"] <= 12
        status.ended("finished")
    ended = read_status(tmp_path)
    assert ended is not None and (ended["state"], ended["reason"], ended["phases"]) == ("finished", None, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [STATUS]
    assert not [thread for thread in threading.enumerate() if thread.name == "status"]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("no\nsuch thing"), "failed", "ValueError: no such thing"),
        (KeyboardInterrupt(), "stopped", "stopped by the user, without a checkpoint of the step"),
    ],
)
def test_how_it_ended(tmp_path: Path, error: BaseException, state: str, reason: str) -> None:
    with pytest.raises(type(error)), StatusFile(tmp_path, 0, 10):
        raise error
    ended = read_status(tmp_path)
    assert ended is not None and (ended["state"], ended["reason"]) == (state, reason)


def test_an_end_without_a_word_is_the_last_step_or_a_stop(tmp_path: Path) -> None:
    for total, state, reason in ((10, "stopped", "ended after step 4, before its last one"), (4, "finished", None)):
        with StatusFile(tmp_path, 0, None) as status:
            assert wait_for(tmp_path, lambda found: found["state"] == "running")["total_steps"] is None
            status.resume(3, total)
            status.log({}, 4)
        ended = read_status(tmp_path)
        assert ended is not None and (ended["state"], ended["reason"], ended["total_steps"]) == (state, reason, total)


def test_the_end_is_written_when_it_comes(tmp_path: Path) -> None:
    with StatusFile(tmp_path, 0, 10) as status:
        status.ended("finished")
        status.log({}, 10)
        assert wait_for(tmp_path, lambda found: found["step"] == 10)["state"] == "running"
    assert (read_status(tmp_path) or {})["state"] == "finished"


def test_a_stop_is_kept(tmp_path: Path) -> None:
    with StatusFile(tmp_path, 0, 10) as status:
        status.ended("stopped", "stopped by the user after step 7")
    ended = read_status(tmp_path)
    assert ended is not None and (ended["state"], ended["reason"]) == ("stopped", "stopped by the user after step 7")


def test_nothing_new_is_written_only_as_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "HEARTBEAT_S", 0.2)
    writes: list[float] = []
    write = StatusFile._write
    monkeypatch.setattr(
        StatusFile, "_write", lambda self, status: (writes.append(time.monotonic()), write(self, status))
    )
    with StatusFile(tmp_path, 0, 10):
        while len(writes) < 3:
            time.sleep(0.01)
    assert min(late - early for early, late in pairwise(writes[:-1])) >= 0.2


def test_a_deleted_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with caplog.at_level(logging.WARNING), StatusFile(folder, 0, 10) as status:
        wait_for(folder, lambda found: True)
        shutil.rmtree(folder)
        for step in range(1, 6):
            status.log({}, step)
            time.sleep(0.03)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder / STATUS} cannot be written (No such file or directory); the run goes on without it"
    ]


def test_a_full_disk_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status_file, "atomic_write_bytes", full)
    with caplog.at_level(logging.WARNING), StatusFile(tmp_path, 0, 10):
        time.sleep(0.05)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / STATUS} cannot be written (No space left on device); the run goes on without it"
    ]


def test_the_thread_outlives_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [RuntimeError("deque mutated during iteration"), ValueError("odd")]

    def broken() -> list[Any]:
        if errors:
            raise errors.pop(0)
        return []

    monkeypatch.setattr(status_file, "current", broken)
    with caplog.at_level(logging.WARNING), StatusFile(tmp_path, 0, 10) as status:
        wait_for(tmp_path, lambda found: found["state"] == "running")
        status.log({}, 7)
        wait_for(tmp_path, lambda found: found["step"] == 7)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / STATUS} cannot be written (RuntimeError: deque mutated during iteration); the run goes on without it"
    ]


def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(status_file, "atomic_write_bytes", lambda *args, **kwargs: released.wait())
    monkeypatch.setattr(status_file, "CLOSE_TIMEOUT_S", 0.05)
    with StatusFile(tmp_path, 0, 10):
        pass
    released.set()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, json.dumps("x").encode()])
def test_damaged_files_are_no_status(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATUS).write_bytes(content)
    assert read_status(tmp_path) is None
