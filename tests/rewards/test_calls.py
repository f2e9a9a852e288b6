"""How reward functions are called: in worker processes, in threads, in one event loop."""

import asyncio
import json
import os
import pickle
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.registry import load_object
from lockstep.rewards import calls, worker
from lockstep.rewards.calls import make_caller
from lockstep.rewards.default import SCORERS, default_compute_score
from lockstep.rewards.errors import RewardHangError, RewardTimeoutError, WorkerDiedError, WorkerStartError
from lockstep.rewards.worker_pool import WorkerPool, WorkerTask, worker_task

SOURCE = """
import os, signal, subprocess, sys, time

class OddError(Exception):
    def __init__(self, a, b):
        super().__init__(a)

def score(text, factor=1.0):
    if text == "hang":
        subprocess.Popen(["sleep", "60"])
        while True:
            pass
    if text == "sleep":
        time.sleep(1000)
    if text == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "leave":
        os._exit(3)
    if text == "exit":
        sys.exit(4)
    if text == "raise":
        raise ValueError("no opinion")
    if text == "odd":
        raise OddError(1, 2)
    if text == "lambda":
        return lambda: 0
    if text == "pid":
        return os.getpid()
    print("noise")
    input_is_empty = sys.stdin.read() == ""
    return {"score": len(text) * factor, "silent": input_is_empty}

async def later(text):
    return len(text)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rewards_of_mine.py"
    path.write_text(SOURCE)
    return str(path)


def rows(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_calls_fail_only_their_own_row(file: str, num_workers: int) -> None:
    call = make_caller(partial(load_object(f"{file}:score"), factor=2.0), timeout_s=1.0, num_workers=num_workers)
    assert isinstance(call, WorkerPool)
    begun = time.monotonic()
    outcomes = call(rows("ab", "hang", "crash", "leave", "exit", "raise", "odd", "lambda", "sleep", "abc"))
    assert outcomes[0] == {"score": 4.0, "silent": True} and outcomes[9] == {"score": 6.0, "silent": True}
    assert isinstance(outcomes[1], RewardTimeoutError) and isinstance(outcomes[8], RewardTimeoutError)
    assert "took longer than reward_model.timeout_s=1" in str(outcomes[1])
    assert isinstance(outcomes[2], WorkerDiedError) and "killed by SIGSEGV" in str(outcomes[2])
    assert "exited with code 3" in str(outcomes[3])
    assert "called exit(4)" in str(outcomes[4])
    assert isinstance(outcomes[5], ValueError) and "in score" in outcomes[5].__notes__[0]
    assert "OddError" in str(outcomes[6])
    assert isinstance(outcomes[7], Exception) and "pickle" in str(outcomes[7]).lower()
    assert time.monotonic() - begun < 20


def test_rows_and_results_larger_than_a_pipe_buffer(tmp_path: Path) -> None:
    path = tmp_path / "echo.py"
    path.write_text("def score(text):\n    return text + text\n")
    call = make_caller(load_object(f"{path}:score"), timeout_s=30.0)
    texts = [letter * size for letter, size in zip("abcdefgh", (1, 300_000, 2, 9_000, 9_000, 9_000, 3, 1_000_000))]
    assert call(rows(*texts)) == [text + text for text in texts]


def test_worker_is_reused_across_rows(file: str) -> None:
    call = make_caller(load_object(f"{file}:score"), timeout_s=10.0)
    pids = call(rows("pid", "pid"))
    assert pids[0] == pids[1] != os.getpid()
    assert call(rows("pid")) == pids[:1]
    assert isinstance(call, WorkerPool)
    call.close()
    assert call(rows("pid")) != pids[:1]


def test_interrupted_call_leaves_no_stale_replies(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_caller(load_object(f"{file}:score"), timeout_s=10.0)
    call(rows("started"))

    def interrupted(self: WorkerPool, batch: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(rows("a", "bb", "ccc", "dddd"))
    assert [outcome["score"] for outcome in call(rows("x" * 7, "y" * 9))] == [7.0, 9.0]


def test_coroutine_functions_run_in_workers_too(file: str) -> None:
    call = make_caller(load_object(f"{file}:later"), timeout_s=10.0, always_workers=True)
    assert call(rows("a", "bb")) == [1, 2]


def test_function_that_fails_to_load_in_a_worker_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "gone.py"
    path.write_text("def score(text):\n    return 1\n")
    call = make_caller(load_object(f"{path}:score"), timeout_s=1.0)
    path.unlink()
    with pytest.raises(
        WorkerStartError, match=r"(?s)gone\.py.*could not be loaded.*no file.*reward_model\.timeout_s=null"
    ):
        call(rows("a"))


def test_functions_that_other_processes_cannot_import() -> None:
    def closure(text: str) -> int:
        return len(text)

    for function in (closure, lambda text: 0, partial(worker_task, 1), load_object):
        assert (worker_task(function, []) is None) == (function is not load_object)
    task = WorkerTask("lockstep.registry:load_object", {"a": 1, "b": 3})
    assert worker_task(partial(partial(load_object, a=1, b=2), b=3), []) == task
    with pytest.raises(ValueError, match=r"closure cannot be called in another process.*reward_manager=naive"):
        make_caller(closure, always_workers=True)


def test_threads_are_abandoned_when_a_call_hangs(caplog: pytest.LogCaptureFixture) -> None:
    def score(text: str) -> int:
        if text == "hang":
            time.sleep(30)
        if text == "exit":
            raise SystemExit(1)
        return len(text)

    begun = time.monotonic()
    outcomes = make_caller(score, timeout_s=0.2)(rows("a", "hang", "bb", "exit", "hang", "ccc"))
    assert [outcomes[0], outcomes[2], outcomes[5]] == [1, 2, 3]
    assert isinstance(outcomes[1], RewardTimeoutError) and isinstance(outcomes[4], RewardTimeoutError)
    assert "called exit(1)" in str(outcomes[3])
    assert time.monotonic() - begun < 5 and "abandoning" in caplog.text


def test_threads_that_only_hang_stop_the_run() -> None:
    begun = time.monotonic()
    with pytest.raises(
        RewardHangError, match=r"<lambda> hangs: 3 times in a row.*test_calls\.py:\d+ in <lambda>; 61 of 64"
    ):
        make_caller(lambda text: time.sleep(20), timeout_s=0.1)(rows(*["a"] * 64))
    assert time.monotonic() - begun < 4


async def score_later(text: str) -> int:
    if text == "hang":
        await asyncio.sleep(30)
    if text == "own":
        raise TimeoutError("the judge's")
    if text == "exit":
        raise SystemExit(1)
    if text == "block":
        time.sleep(3)
    return len(text)


def test_coroutines_time_out(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = make_caller(score_later, timeout_s=0.2)(rows("a", "hang", "own", "exit"))
    assert outcomes[0] == 1 and isinstance(outcomes[1], RewardTimeoutError)
    assert type(outcomes[2]) is TimeoutError and "called exit(1)" in str(outcomes[3])
    assert "row 1 of 4" in caplog.text and "called from" in caplog.text and "in score_later" in caplog.text


def test_coroutines_that_only_hang_stop_the_run() -> None:
    begun = time.monotonic()
    with pytest.raises(RewardHangError, match=r"score_later hangs: 3 times in a row.*in score_later; \d+ of 64 rows"):
        make_caller(score_later, timeout_s=0.1, max_concurrency=2)(rows(*["hang"] * 64))
    assert time.monotonic() - begun < 2
    outcomes = make_caller(score_later, timeout_s=0.1, max_concurrency=4)(rows("hang", "hang", "hang", "a"))
    assert [isinstance(outcome, RewardTimeoutError) for outcome in outcomes] == [True, True, True, False]


def test_coroutine_that_blocks_the_loop_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows behind it were not called, so they must not score 0."""
    monkeypatch.setattr(calls, "THREAD_GRACE_S", 0.2)
    begun = time.monotonic()
    with pytest.raises(
        RewardHangError, match=r"score_later blocks its event loop.*test_calls\.py:\d+ in score_later\."
    ):
        make_caller(score_later, timeout_s=0.2)(rows("a", "block", "ccc"))
    assert time.monotonic() - begun < 2


@pytest.mark.usefixtures("no_registrations")
def test_built_in_scorers_run_inline_and_registered_ones_do_not(tmp_path: Path) -> None:
    assert not isinstance(make_caller(default_compute_score, timeout_s=1.0), WorkerPool)
    assert not isinstance(make_caller(partial(default_compute_score, scorer="math"), timeout_s=1.0), WorkerPool)
    path = tmp_path / "registers.py"
    path.write_text(
        "from lockstep.rewards.default import SCORERS\n\n"
        "@SCORERS.register('tests/registered')\ndef half(solution_str, ground_truth):\n    return 0.5\n"
    )
    try:
        load_object(f"{path}:half")
        call = make_caller(default_compute_score, timeout_s=30.0)
        row = {"data_source": "tests/registered", "solution_str": "", "ground_truth": ""}
        assert isinstance(call, WorkerPool) and call([row]) == [0.5]
    finally:
        SCORERS._entries.pop("tests/registered")


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"reward_model\.timeout_s=0: must be above 0, or null"):
        make_caller(len, timeout_s=0)
    with pytest.raises(ValueError, match=r"num_workers=0: must be at least 1"):
        make_caller(load_object, timeout_s=1.0, num_workers=0)


@pytest.mark.usefixtures("no_registrations")
def test_slow_built_in_scorers_run_concurrently() -> None:
    def judge(text: str) -> int:
        if text != "fast":
            time.sleep(0.3)
        return len(text)

    texts = ["fast"] * 20 + ["slow" * number for number in range(8)]
    begun = time.monotonic()
    assert calls._call_built_in(judge, 8, rows(*texts)) == [len(text) for text in texts]
    assert time.monotonic() - begun < 1.8  # one after another: 2.4 s
    caller = make_caller(default_compute_score, timeout_s=300.0)
    assert isinstance(caller, partial) and caller.func is calls._call_built_in and caller.args[1] >= 1


def test_the_place_of_an_exception_survives_its_own_pickling() -> None:
    """JSONDecodeError is unpickled from its arguments alone, without notes."""
    outcome = pickle.loads(worker.attempt(json.loads, {"s": "not json"}))
    assert isinstance(outcome, json.JSONDecodeError) and "raw_decode" in "".join(outcome.__notes__)
