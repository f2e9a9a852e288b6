"""Reward workers under stop signals, kills and functions that hang: scores stay right, or the run stops with the cause."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.registry import load_object
from lockstep.rewards import monitor, worker_pool
from lockstep.rewards.calls import default_num_workers, make_caller
from lockstep.rewards.errors import RewardError, RewardHangError, RewardTimeoutError, WorkerDiedError, WorkerStartError
from lockstep.rewards.worker_pool import WorkerPool
from lockstep.rewards.worker_process import WorkerTask
from lockstep.utils import progress

SOURCE = """
import multiprocessing, os, pathlib, signal, subprocess, sys, time

HERE = pathlib.Path(__file__).parent

def note(text):
    with open(HERE / f"called-{text}", "a") as file:
        file.write(f"{os.getppid()} {os.getpid()}\\n")

def wait_for(name):
    while not (HERE / name).exists():
        time.sleep(0.005)

def sleep_long():
    time.sleep(1000)

def score(text):
    if text == "hang" or text.startswith("hang-"):
        sleep_long()
    if text.startswith("wait-"):
        note(text)
        wait_for("go")
    if text == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)" if not (HERE / "go").exists() else ""])
        (HERE / "grandchild").write_text(str(child.pid))
        note(text)
        return child.wait() + 1.0
    if text == "suicide":
        note(text)
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "leaves-a-daemon":
        note(text)
        if os.fork() == 0:
            os.setsid()
            wait_for("go")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "terminates":
        children = [multiprocessing.get_context("fork").Process(target=sleep_long), subprocess.Popen(["sleep", "1000"])]
        children[0].start()
        for child in children:
            child.terminate()
        children[0].join()
        return float(children[1].wait() == -15 and children[0].exitcode == -15)
    if text == "signals-itself":
        os.killpg(0, signal.SIGTERM)
        return 0.5
    if text == "pid":
        return os.getpid()
    if text == "slow-pid":
        time.sleep(0.1)
        return os.getpid()
    return float(len(text))

def forever(text):
    sleep_long()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., WorkerPool]]:
    pools: list[WorkerPool] = []

    def make_pool(name: str = "score", timeout_s: float = 20.0, num_workers: int | None = None) -> WorkerPool:
        pool = make_caller(load_object(f"{folder}/judge.py:{name}"), timeout_s=timeout_s, num_workers=num_workers)
        assert isinstance(pool, WorkerPool)
        pools.append(pool)
        return pool

    yield make_pool
    for pool in pools:
        pool.close()


def rows(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def wait_until(is_so: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pids_of(folder: Path, text: str) -> list[list[int]]:
    """[supervisor, function process] of each call of a row."""
    path = folder / f"called-{text}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    pids = [list(map(int, line.split())) for line in lines if line.endswith("\n")]
    assert not any(os.getpid() in pair for pair in pids)  # they will get signals
    return pids


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def while_calling(pool: WorkerPool, texts: Iterable[str], meanwhile: Callable[[], None]) -> list[Any]:
    """The outcomes of a call during which `meanwhile` runs in another thread."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            meanwhile()
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    outcomes = pool(rows(*texts))
    thread.join()
    if failed:
        raise failed[0]
    return outcomes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_stop_signal_to_all_workers_leaves_the_scores_right(folder: Path, make: Any, number: int) -> None:
    pool = make(num_workers=2)
    waiting = ["wait-1", "wait-22"]

    def send() -> None:
        wait_until(lambda: all(pids_of(folder, text) for text in waiting))
        for text in waiting:
            for pid in pids_of(folder, text)[0]:
                os.kill(pid, number)
        time.sleep(0.05)
        (folder / "go").touch()

    assert while_calling(pool, ["a", *waiting, "ccc"], send) == [1.0, 6.0, 7.0, 3.0]
    first = {text: pids_of(folder, text)[0] for text in waiting}
    assert all(is_alive(pid) for pids in first.values() for pid in pids)


def test_stop_signal_to_what_the_function_started_leaves_its_score_right(folder: Path, make: Any) -> None:
    """The whole job gets the signal; the child dies of it, so the row is called again."""

    def send() -> None:
        wait_until(lambda: pids_of(folder, "child"))
        (folder / "go").touch()
        os.killpg(pids_of(folder, "child")[0][1], signal.SIGTERM)

    assert while_calling(make(num_workers=1), ["a", "child", "b"], send) == [1.0, 1.0, 1.0]
    assert len(pids_of(folder, "child")) == 2


def test_function_can_terminate_its_children_and_signal_its_group(make: Any) -> None:
    assert make(timeout_s=10.0)(rows("terminates", "signals-itself", "a")) == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("which", [0, 1])
def test_worker_killed_from_outside_is_replaced_and_its_row_called_again(
    folder: Path, make: Any, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    def kill() -> None:
        wait_until(lambda: pids_of(folder, "wait-"))
        pids = pids_of(folder, "wait-")[0]
        os.kill(pids[which], signal.SIGKILL)
        wait_until(lambda: not is_alive(pids[1]))
        (folder / "go").touch()

    texts = ["a" * number for number in range(20)]
    outcomes = while_calling(make(num_workers=2), [*texts, "wait-", *texts], kill)
    assert outcomes == [*range(20), 5.0, *range(20)]
    assert len(pids_of(folder, "wait-")) == 2
    assert "was killed by SIGKILL on row 20 of 41; calling it again" in caplog.text or which == 0


def test_idle_worker_killed_from_outside_is_replaced(make: Any) -> None:
    pool = make(num_workers=1)
    (pid,) = pool(rows("pid"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pool._workers[0].process.poll() is not None)
    assert pool(rows("pid", "a"))[0] not in (pid, None)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_row_that_kills_its_process_twice_fails(folder: Path, make: Any, num_workers: int) -> None:
    outcomes = make(num_workers=num_workers)(rows("a", "bb", "suicide", "ccc", "dddd"))
    assert [outcomes[0], outcomes[1], outcomes[3], outcomes[4]] == [1.0, 2.0, 3.0, 4.0]
    assert isinstance(outcomes[2], WorkerDiedError)
    assert "score was killed by SIGKILL, twice on the same row" in str(outcomes[2])
    assert len(pids_of(folder, "suicide")) == 2


def test_death_is_seen_though_a_daemon_keeps_the_pipe_open(
    folder: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "LIVENESS_S", 0.2)
    try:
        outcomes = make(num_workers=1)(rows("leaves-a-daemon", "a"))
        assert isinstance(outcomes[0], WorkerDiedError) and outcomes[1] == 1.0
    finally:
        (folder / "go").touch()


def test_out_of_memory_stops_the_run(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([7, 9])
    monkeypatch.setattr(worker_pool, "_num_oom_kills", lambda: next(counts))
    with pytest.raises(RewardError, match=r"score was killed by SIGKILL twice on row 1: the machine is out of memory"):
        make()(rows("a", "suicide", "b"))


def test_worker_that_cannot_start_stops_the_run(folder: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "gone"))
    with pytest.raises(WorkerStartError, match=r"no worker process could be started.*judge\.py:score.*No such file"):
        make()(rows("a"))
    (folder / "dies").write_text("#!/bin/sh\nexit 7\n")
    (folder / "dies").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "dies"))
    with pytest.raises(
        WorkerStartError, match=r"could not be loaded in a worker process: the process exited with code 7"
    ):
        make()(rows("a"))


def test_import_that_hangs_stops_the_run(folder: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    with (folder / "judge.py").open("a") as file:
        file.write("sleep_long()\n")
    monkeypatch.setattr(
        worker_pool, "START_TIMEOUT_S", 4.0
    )  # of which a busy machine may need some to start the process
    with pytest.raises(
        WorkerStartError, match=r"it took longer than 4 s, at \S*judge\.py:\d+ in sleep_long, called from"
    ):
        pool(rows("a"))


def test_modules_in_the_working_folder_do_not_shadow_those_of_a_worker(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "struct.py").write_text("raise RuntimeError('not the standard library')\n")
    monkeypatch.chdir(tmp_path / "run")
    assert make()(rows("ab")) == [2.0]


PARENT = """
import sys, threading
from lockstep.registry import load_object
from lockstep.rewards.calls import make_caller
call = make_caller(load_object(sys.argv[1] + ":score"), timeout_s=100.0, num_workers=3)
thread = threading.Thread(target=call, args=([{"text": "wait-1"}, {"text": "child"}, {"text": "wait-2"}],))
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_workers_end_with_a_killed_parent(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder / "judge.py")])
    try:
        names = ["wait-1", "child", "wait-2"]
        wait_until(lambda: all(pids_of(folder, name) for name in names))
        pids = [pid for name in names for pid in pids_of(folder, name)[0]]
        pids.append(int((folder / "grandchild").read_text()))
        assert all(map(is_alive, pids))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=5.0)


def test_workers_end_with_their_pool(folder: Path) -> None:
    pool = WorkerPool(WorkerTask(f"{folder / 'judge.py'}:score"), 1, 60.0)
    assert pool(rows("x")) == [1.0]
    process = pool._workers[0].process
    gc.disable()
    try:
        del pool
        assert process.poll() is not None
    finally:
        gc.enable()


def test_workers_survive_the_thread_that_called_them(make: Any) -> None:
    pool = make(num_workers=1)
    pids: list[int] = []
    thread = threading.Thread(target=lambda: pids.extend(pool(rows("pid"))))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert pool(rows("pid")) == pids


def test_row_that_hangs_is_logged_at_once_and_fails_alone(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = make(timeout_s=1.0, num_workers=2)
    texts = ["a" * (number % 7) for number in range(40)]
    texts[13] = texts[30] = "hang"
    outcomes = pool(rows(*texts))
    assert [number for number, outcome in enumerate(outcomes) if isinstance(outcome, RewardTimeoutError)] == [13, 30]
    assert all(outcome == len(text) for outcome, text in zip(outcomes, texts) if text != "hang")
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "row 13 of 40" in record.getMessage() or "row 30 of 40" in record.getMessage()
    assert "judge.py:score" in record.getMessage() and "in sleep_long, called from" in record.getMessage()


@pytest.mark.parametrize("num_workers", [1, 4])
def test_function_that_only_hangs_stops_the_run(make: Any, num_workers: int) -> None:
    pool = make("forever", timeout_s=0.4, num_workers=num_workers)
    begun = time.monotonic()
    with pytest.raises(
        RewardHangError,
        match=r"judge\.py:forever hangs: 3 times in a row, every call took longer than reward_model\.timeout_s=0\.4, "
        r"the last one at "
        r"\S*judge\.py:\d+ in sleep_long, called from \S*judge\.py:\d+ in forever; \d+ of 64 rows were waiting",
    ):
        pool(rows(*["a"] * 64))
    assert time.monotonic() - begun < 10  # 64 time-outs in a row would take 26 s
    assert not any(worker.rows for worker in pool._workers)


def test_rows_that_hang_while_others_end_do_not_stop_the_run(make: Any) -> None:
    texts = [*["slow-pid"] * 40, "hang", "hang", "hang", *["slow-pid"] * 20]
    outcomes = make(timeout_s=1.0, num_workers=4)(rows(*texts))
    assert [isinstance(outcome, RewardTimeoutError) for outcome in outcomes] == [text == "hang" for text in texts]


def test_too_many_time_outs_stop_the_run(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "MAX_TIMEOUTS", 3)
    texts = ["a" if number % 3 else "hang" for number in range(60)]
    with pytest.raises(RewardHangError, match=r"too many samples: 3 calls.*timeout_s=0\.4.*Sample: row \d+ of 60"):
        make(timeout_s=0.4, num_workers=2)(rows(*texts))


def test_a_time_out_names_its_sample() -> None:
    row = {"data_source": "mine", "solution_str": "x" * 70, "ground_truth": "1", "extra_info": {"index": 7}}
    calls = monitor.CallMonitor("judge.py:score", [row], 1.0)
    assert calls._sample(0) == f"row 0 of 1, data_source 'mine', extra_info.index 7, response '{'x' * 60}'…"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_prompt_whose_samples_all_hang_does_not_stop_the_run(make: Any, num_workers: int) -> None:
    texts = [*["a"] * 4, *["hang"] * 4, *["b"] * 4, *["c"] * 4]
    outcomes = make(timeout_s=0.5, num_workers=num_workers)(rows(*texts))
    assert [isinstance(outcome, RewardTimeoutError) for outcome in outcomes] == [text == "hang" for text in texts]


def test_progress_is_reported(folder: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_CALL_S", 0.1)
    seen: list[str] = []

    def go() -> None:
        wait_until(lambda: "rewards 2/3, one call running" in progress.describe()[0])
        seen.append(progress.describe()[0])
        (folder / "go").touch()

    with progress.phase("rewards"):
        while_calling(make(), ["a", "b", "wait-"], go)
    assert re.fullmatch(r"rewards 2/3, one call running for \d s", seen[0])


def test_number_of_workers_does_not_change_the_outcomes(make: Any) -> None:
    texts = ["x" * (number * 37 % 101) for number in range(300)]
    for num_workers in (1, 2, 5):
        assert make(num_workers=num_workers)(rows(*texts)) == [len(text) for text in texts]


def test_workers_are_started_as_needed(make: Any) -> None:
    fast, slow = make(num_workers=3), make(num_workers=3)
    assert len(set(fast(rows(*["pid"] * 500)))) == 1
    pids: set[Any] = set()
    end = time.monotonic() + 60
    while len(pids) < 3 and time.monotonic() < end:
        pids |= set(slow(rows(*["slow-pid"] * 40)))
    assert len(pids) == 3
    assert 1 <= default_num_workers() <= 16
