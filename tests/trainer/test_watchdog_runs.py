"""Runs that hang: what they say, and how they end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.sft import SFTConfig
from lockstep.observability.status_file import read_status
from lockstep.single_controller import HangError
from lockstep.trainer.run import hang_exit
from lockstep.trainer.run.hang_exit import HangExit, HangInterrupt
from lockstep.trainer.run.processes import controller_address
from lockstep.utils import main_thread
from lockstep.utils.background_call import BackgroundCall
from tests.programs import Program

STUCK_REWARD = """
from pathlib import Path
CALLS = Path({calls!r})

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with CALLS.open("a") as file:
        file.write("x")
    while CALLS.stat().st_size > 5:
        pass
    return len(solution_str)
"""


@pytest.mark.slow
def test_a_reward_that_never_returns_stops_the_run_with_code_3(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK_REWARD.format(calls=str(tmp_path / "calls")))
    watched = ["trainer.on_hang=stop", "trainer.watchdog.deadlines_s={rewards: 2}", "trainer.save_freq=1"]
    reward = [f"custom_reward_function.path={tmp_path}/stuck.py", "trainer.val_before_train=false"]
    reward += ["trainer.audit.reward_probe=off"]
    program = Program("lockstep.trainer.main_ppo", [*overrides, *watched, *reward], tmp_path)
    assert program.wait() == 3
    error = program.stderr.splitlines()[-1]
    assert re.match(r"error: no progress in 'rewards \d/4' for \d s \(deadline 2 s\): ", error), error
    assert error.endswith(f"run the same command to resume from its last checkpoint, {tmp_path}/run/global_step_1")
    (report,) = (tmp_path / "run" / "hangs").iterdir()
    assert f"(report: {report})" in error and program.stderr.count("no progress in") == 1
    text = report.read_text()
    assert re.search(r"1\. the reward .*stuck.py:compute_score, row \d of 4 \(pid \d+\) has not answered for", text), (
        text
    )
    for part in ("controller rank 0: step", "Thread MainThread", "worker_pool.py", "in compute_score"):
        assert part in text, text
    status = read_status(tmp_path / "run")
    assert status is not None and status["state"] == "failed"
    assert status["reason"] in error


@pytest.mark.slow
def test_a_stopped_rank_is_named(overrides: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')
    run = tmp_path / "run"
    watched = ["trainer.on_hang=stop", "trainer.watchdog.deadlines_s={heartbeat: 3}", "trainer.save_freq=1"]
    own = [*overrides, "trainer.n_gpus_per_node=2", "trainer.val_before_train=false"]
    command = [sys.executable, "-m", "lockstep.trainer.main_ppo", *own, "trainer.total_epochs=100"]
    process = subprocess.Popen([*command, *watched], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while (status := read_status(run) or {}).get("step", 0) < 2 or not (rank := _rank(status)):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        os.kill(rank["pid"], signal.SIGSTOP)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 3
    role = "actor_rollout+critic"
    assert f"{role} rank 1 (pid {rank['pid']}, {rank['host']}) does not answer: the process is stopped" in errors
    (report,) = (run / "hangs").iterdir()
    assert f"Stacks of {role} rank" in report.read_text()
    assert (read_status(run) or {})["state"] == "failed"
    with pytest.raises(ProcessLookupError):
        os.kill(rank["pid"], 0)


def _rank(status: dict[str, Any]) -> dict[str, Any] | None:
    return next((worker for worker in status.get("workers", []) if worker["rank"] == 1), None)


def test_the_runs_thread_is_interrupted_also_if_it_catches_the_first_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_exit, "REPEAT_S", 0.05)
    previous = signal.getsignal(main_thread.SIGNAL)
    caught = 0
    with pytest.raises(HangError, match="no progress") as raised, HangExit(True, lambda verdict: None) as ending:
        try:
            ending.end("no progress")
            threading.Event().wait(30)
        except HangInterrupt:
            caught += 1
        threading.Event().wait(30)
    assert caught == 1 and raised.value.may_restart
    assert signal.getsignal(main_thread.SIGNAL) == previous
    with pytest.raises(KeyError), HangExit(True, lambda verdict: None):  # it was not stuck
        raise KeyError


def test_the_end_of_a_stuck_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, stalled = threading.Event(), threading.Event()
    monkeypatch.setattr(hang_exit, "UNWIND_S", 0.0)
    monkeypatch.setattr(hang_exit, "EXIT_S", 0.05)
    monkeypatch.setattr(hang_exit, "force_exit", lambda message: ended.set())

    def write(*_: object) -> None:
        """To a disk that does not answer."""
        stalled.wait(30)

    HangExit(False, write).end("no progress")
    assert ended.wait(10)
    saving = BackgroundCall(write, name="save")
    with pytest.raises(TimeoutError, match=r"not complete after 0\.05 s"):
        saving.finish(0.05)
    stalled.set()
    saving.finish()


def test_a_name_that_is_unknown_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert controller_address(SFTConfig()) == ("::1", "sft")
    monkeypatch.setenv("MASTER_ADDR", "no.such.machine.invalid")
    with pytest.raises(OSError):  # TrainingRun warns
        controller_address(SFTConfig())
