"""Restarts within one command: what they count, how long they wait, what they leave in the folder and in the config."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.observability.status_file import read_status
from lockstep.single_controller import RestartError, WorkerDiedError
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.trainer.run import restarts as restarts_module
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.interrupt import Interrupt
from lockstep.trainer.run.restarts import BACKOFF_S, Restarts
from lockstep.trainer.run.training_run import TrainingRun


def test_pauses_grow_until_there_is_a_new_checkpoint(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 10)
    died = WorkerDiedError("it died")
    pauses = [restarts.note(died, tmp_path / "global_step_2") for _ in range(6)]
    assert pauses == [1, 5, 30, 60, 60, 60] == [*BACKOFF_S, 60, 60]
    assert restarts.note(RestartError("smaller", counts=False, changes={"a.b": 1}), tmp_path / "global_step_2") == 0
    assert restarts.note(died, tmp_path / "global_step_4") == 1
    assert (restarts.count, restarts.left) == (8, 3) and restarts.allows(died)
    for _ in range(3):
        restarts.note(died, None)
    assert not restarts.allows(died) and restarts.allows(RestartError("smaller", counts=False))
    lines = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert [line["counts"] for line in lines] == [True] * 6 + [False] + [True] * 4
    assert lines[6]["changes"] == {"a.b": 1} and lines[6]["cause"] == "smaller" and lines[1]["wait_s"] == 5


def test_restart_error_survives_the_way_to_the_controller() -> None:
    error = pickle.loads(pickle.dumps(RestartError("smaller", counts=False, changes={"a": 1})))
    assert (str(error), error.counts, error.changes) == ("smaller", False, {"a": 1})
    died = pickle.loads(pickle.dumps(WorkerDiedError("it died")))
    assert isinstance(died, RestartError) and died.counts and died.changes == {}


class Scripted(TaskRunner):
    """Each attempt locks the folder, logs a step and then does what the script says: an exception, or an exit code."""

    def __init__(self, script: list[Exception | int]) -> None:
        super().__init__()
        self.script = script
        self.configs: list[PPOConfig] = []
        self.statuses: list[Any] = []
        self.has_begun = True

    def _run_once(self, config: PPOConfig, interrupt: Interrupt | None) -> int:
        self.configs.append(config)
        with TrainingRun(config) as run:
            run.restarts = self.restarts
            run.lock(10)
            run.open(0, 10, {})
            run.log({"training/global_step": 1}, 1)
            self.statuses.append(read_status(run.folder))
            outcome = self.script.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return run.done(10)


@pytest.fixture
def config(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PPOConfig:
    monkeypatch.setattr(restarts_module, "BACKOFF_S", (0.0,))
    return load_config(
        PPOConfig, [*overrides, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.max_restarts=1"]
    )


def test_run_goes_on_after_restarts(
    config: PPOConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    smaller = RestartError("out of memory", counts=False, changes={"data.train_batch_size": 2})
    runner = Scripted([WorkerDiedError("rank 1 died"), smaller, 0])
    assert runner.run(config) == 0
    assert [c.data.train_batch_size for c in runner.configs] == [config.data.train_batch_size] * 2 + [2]
    assert "rank 1 died; restarting the workers from the start of the run (0 restarts left)" in caplog.text
    assert "error: " not in capsys.readouterr().err
    status = read_status(tmp_path / "run")
    assert status is not None and status["state"] == "finished"
    assert [(r["step"], r["cause"]) for r in status["restarts"]] == [(1, "rank 1 died"), (1, "out of memory")]
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["training/restarts"] == 2
    with TrainingRun(config) as run:
        run.lock()  # the runner has given it back


def test_status_is_running_while_a_restart_is_under_way(
    config: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def wait(self: Restarts, pause_s: float, is_stopped: Any) -> bool:
        assert self.status is not None
        seen.append(self.status._status())
        return bool(is_stopped())

    monkeypatch.setattr(Restarts, "wait", wait)
    runner = Scripted([WorkerDiedError("rank 1 died"), WorkerDiedError("rank 0 died")])
    with pytest.raises(RunError, match="rank 0 died; the run ended early"):
        runner.run(config)
    assert [(status["state"], status["reason"], len(status["restarts"])) for status in seen] == [("running", None, 1)]
    status = read_status(tmp_path / "run")
    assert status is not None and status["state"] == "failed" and "rank 0 died" in status["reason"]


def test_stop_before_a_restart(config: PPOConfig, tmp_path: Path) -> None:
    interrupt, ended = Interrupt(), []
    interrupt.stop("the user")
    runner = Scripted([WorkerDiedError("rank 1 died"), 0])
    runner.on_end = ended.append
    assert runner.run(config, interrupt) == 130 and ended == [130] and len(runner.configs) == 1
    status = read_status(tmp_path / "run")
    assert status is not None and status["state"] == "stopped" and "before a restart" in status["reason"]


def test_error_of_a_restart_names_it(config: PPOConfig) -> None:
    runner = Scripted([WorkerDiedError("rank 1 died"), RunError("no machine is left")])
    with pytest.raises(RunError, match="the restart failed: no machine is left; the run ended early"):
        runner.run(config)
    with pytest.raises(RunError, match=r"^wrong input$"):
        Scripted([RunError("wrong input")]).run(config)
