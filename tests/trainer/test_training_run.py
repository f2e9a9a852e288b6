"""A run's folder: what it resumes from, when it saves, what it logs and in which order it closes."""

import errno
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig
from lockstep.config.sft import SFTConfig, SupervisedConfig
from lockstep.observability.run_folder import PLAN
from lockstep.observability.status_file import read_status
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run import training_run
from lockstep.trainer.run.checkpoint import CheckpointStore, verify
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.training_run import LOADER_STATE, TRAINER_STATE, TrainingRun, num_training_steps
from lockstep.utils.state_file import load_state
from tests.metrics import metrics_of

PROGRAMS: dict[type, list[str]] = {
    PPOConfig: ["actor_rollout_ref.model.path=m", "data.train_files=[t.parquet]", "algorithm.adv_estimator=grpo"],
    SFTConfig: ["model.path=m", "data.train_files=[t.parquet]"],
    DPOConfig: ["model.path=m", "data.train_files=[t.parquet]"],
}


def run_of(folder: Path, cls: type = PPOConfig, *overrides: str) -> TrainingRun:
    settings = [*PROGRAMS[cls], f"trainer.default_local_dir={folder}", "trainer.logger=[]", *overrides]
    config: PPOConfig | SupervisedConfig = load_config(cls, settings, run_checks=False)
    return TrainingRun(config)


def save(run: TrainingRun, step: int, metrics: dict[str, Any]) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").write_text("w")

    run.save(step, write, loader={"position": step}, trainer={"metrics": metrics})


@pytest.mark.parametrize("cls", PROGRAMS)
def test_a_second_process_resumes_from_the_last_checkpoint(tmp_path: Path, cls: type) -> None:
    with run_of(tmp_path, cls) as first:
        assert first.claim() is None and not first.is_open
        first.open(0, 3, {})
        first.tracking.log(data={"loss": 1.0}, step=1)
        save(first, 2, {"loss": 0.5})  # and dies before it tracks step 2
    with run_of(tmp_path, cls) as second:
        assert not second.is_finished(3)
        found = second.claim()
        assert found == (2, tmp_path / "global_step_2") and second.last_checkpoint == found[1]
        assert load_state(found[1] / LOADER_STATE) == {"position": 2}
        assert load_state(found[1] / TRAINER_STATE) == {"global_steps": 2, "metrics": {"loss": 0.5}}
        second.open(2, 3, {"loss": 0.5})
        assert second.is_open
        save(second, 3, {"loss": 0.25})
        second.tracking.log(data={"loss": 0.25}, step=3)
    assert [(row["step"], row["loss"]) for row in metrics_of(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert run_of(tmp_path, cls).is_finished(3) and run_of(tmp_path, cls).is_finished(2)
    assert not run_of(tmp_path, cls, "trainer.resume_mode=disable").is_finished(3)
    with run_of(tmp_path, cls, "trainer.resume_mode=disable") as anew:
        assert anew.claim() is None
    with run_of(tmp_path, cls) as restarted:
        assert restarted.claim(tmp_path / "global_step_2") == (2, tmp_path / "global_step_2")


def test_a_run_that_only_validates_leaves_config_and_metrics(tmp_path: Path) -> None:
    with run_of(tmp_path) as trained:
        trained.claim()
        trained.open(0, 2, {})
        save(trained, 2, {})
        trained.tracking.log(data={"loss": 1.0}, step=2)
    config = (tmp_path / "config.yaml").read_bytes()
    with run_of(tmp_path, PPOConfig, "trainer.val_only=true", "data.val_files=[v.parquet]") as validated:
        assert not validated.trains and not validated.is_finished(2)
        step, _ = validated.claim() or (0, None)
        validated.open(step, 0, {})
        validated.tracking.log(data={"val": 1.0}, step=step)
    assert (tmp_path / "config.yaml").read_bytes() == config
    assert [row["step"] for row in metrics_of(tmp_path)] == [2, 2]


@pytest.mark.parametrize(("frequency", "saved"), [(-1, [5]), (0, []), (2, [2, 4, 5]), (5, [5]), (7, [5])])
def test_steps_that_are_saved_and_tested(tmp_path: Path, frequency: int, saved: list[int]) -> None:
    run = run_of(tmp_path, PPOConfig, f"trainer.save_freq={frequency}", f"trainer.test_freq={frequency or -1}")
    assert [step for step in range(1, 6) if run.must_save(step, 5)] == saved
    assert [step for step in range(1, 6) if run.must_test(step, 5)] == (saved if frequency > 0 else [])


def test_a_failed_start_closes_in_reverse_order_and_releases_the_lock(tmp_path: Path) -> None:
    run, closed = run_of(tmp_path), list[str]()
    with pytest.raises(RuntimeError, match="no memory"), ExitStack() as on_error:
        on_error.push(run)
        run.claim()
        run.callback(closed.append, "source")
        with pytest.raises(ValueError, match="is in use by a live run"):
            run_of(tmp_path).claim()
        run.callback(closed.append, "profiler")
        raise RuntimeError("no memory")
    assert closed == ["profiler", "source"]
    with run_of(tmp_path) as other:
        assert other.claim() is None


def test_the_number_of_steps(tmp_path: Path) -> None:
    def steps(*overrides: str) -> int:
        return num_training_steps(run_of(tmp_path, SFTConfig, "trainer.total_epochs=3", *overrides).config, 4)

    assert steps() == 12
    assert steps("trainer.total_training_steps=5") == 5
    assert steps("trainer.total_training_steps=50") == 12


def test_the_status_says_how_a_run_ended(tmp_path: Path) -> None:
    for name, end, state, reason in (
        ("done", lambda run: run.done(3), "finished", None),
        ("stopped", lambda run: run.stopped(2, "the user"), "stopped", "stopped by the user after step 2"),
    ):
        with run_of(tmp_path / name) as run:
            run.claim()
            run.open(0, 3, {})
            run.log({"timing_s/step": 1.0}, 2)
            end(run)
        status = read_status(tmp_path / name)
        assert status is not None and (status["state"], status["reason"], status["step"]) == (state, reason, 2)
    with pytest.raises(OSError), run_of(tmp_path / "failed", SFTConfig) as run:
        run.claim()
        run.open(0, 3, {})
        raise OSError(28, "No space left on device")
    status = read_status(tmp_path / "failed")
    assert status is not None and status["state"] == "failed"
    assert status["reason"].startswith("No space left on device in trainer.default_local_dir=")


def state_in(folder: Path) -> Any:
    return (read_status(folder) or {}).get("state")


def test_a_resumed_run_is_running_before_its_models_are_loaded(tmp_path: Path) -> None:
    with run_of(tmp_path) as run:
        run.claim()
        run.open(0, 3, {})
        run.log({"loss": 1.0}, 2)
        run.stopped(2, "the user")
    assert state_in(tmp_path) == "stopped"
    with pytest.raises(RunError), run_of(tmp_path) as run:
        run.lock(3)
        while state_in(tmp_path) != "running":
            time.sleep(0.01)
        raise RunError("the model cannot be loaded")
    status = read_status(tmp_path) or {}
    assert (status["state"], status["reason"]) == ("failed", "the model cannot be loaded")
    assert (status["step"], status["total_steps"]) == (2, 3)


def test_a_run_is_finished_when_its_trackers_are(tmp_path: Path) -> None:
    seen = []
    with run_of(tmp_path) as run:
        run.claim()
        run.callback(lambda: seen.append(state_in(tmp_path)))
        run.open(0, 1, {})
        while state_in(tmp_path) is None:
            time.sleep(0.01)
        run.log({}, 1)
        run.done(1)
    assert seen == ["running"] and state_in(tmp_path) == "finished"


def test_a_failed_explanation_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(training_run, "explain", broken)
    with pytest.raises(KeyError, match="the real one"), run_of(tmp_path) as run:
        run.claim()
        raise KeyError("the real one")
    assert (read_status(tmp_path) or {})["reason"] == "KeyError: 'the real one'"


def test_a_validation_leaves_the_status_of_the_training(tmp_path: Path) -> None:
    with run_of(tmp_path, PPOConfig, "trainer.val_only=true") as run:
        run.claim()
        run.open(0, 3, {})
    assert read_status(tmp_path) is None and not (tmp_path / PLAN).exists()


@pytest.mark.parametrize("cls", PROGRAMS)
def test_background_saves(tmp_path: Path, cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save returns before the checkpoint is complete; the next save and the end wait for it, and raise what has failed."""
    may_seal = threading.Event()
    seal = CheckpointStore._seal

    def delayed(store: CheckpointStore, staging: Path, step: int) -> None:
        assert may_seal.wait(30)
        seal(store, staging, step)

    monkeypatch.setattr(CheckpointStore, "_seal", delayed)
    with run_of(tmp_path, cls, "trainer.async_save=true") as run:
        assert run.claim() is None
        run.open(0, 4, {})
        save(run, 1, {"loss": 1.0})
        assert run.last_checkpoint is None and not (tmp_path / "global_step_1").exists()
        threading.Timer(0.05, may_seal.set).start()
        save(run, 2, {"loss": 0.5})  # waits for the first
        assert (tmp_path / "global_step_1").is_dir()
        assert run.done(2) == 0  # waits for the second
        assert run.last_checkpoint == tmp_path / "global_step_2" and verify(run.last_checkpoint).step == 2

        monkeypatch.setattr(CheckpointStore, "_seal", full_disk)
        save(run, 3, {"loss": 0.2})
        with pytest.raises(OSError, match=r"cannot save global_step_3 in trainer\.default_local_dir=.*No space left"):
            run.finish_saving()
        assert not list(tmp_path.glob(".staging-*")) and run.last_checkpoint == tmp_path / "global_step_2"
        save(run, 4, {"loss": 0.1})
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_1", "global_step_2"]


def full_disk(store: CheckpointStore, staging: Path, step: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_crash_during_a_background_save_loses_only_that_checkpoint(tmp_path: Path) -> None:
    """What a killed process leaves: a staged folder that was not committed."""
    with run_of(tmp_path) as first:
        assert first.claim() is None
        first.open(0, 3, {})
        save(first, 1, {"loss": 1.0})
        first.checkpoints.stage(2, lambda folder: (folder / "weights").write_text("w"))
    assert list(tmp_path.glob(".staging-*"))
    with run_of(tmp_path) as second:
        assert second.claim() == (1, tmp_path / "global_step_1")
    assert not list(tmp_path.glob(".staging-*"))


WEIGHTS = ("model.safetensors", "optim_world_size_1_rank_0.pt", ".distcp")


def test_a_run_that_saves_in_the_background_leaves_the_same_checkpoints(overrides: list[str], tmp_path: Path) -> None:
    files = []
    for name in ("false", "true"):
        run = [f"trainer.async_save={name}", f"trainer.default_local_dir={tmp_path}/{name}", "trainer.save_freq=1"]
        settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"]
        assert main([*overrides, *settings, *run, "trainer.total_training_steps=2"]) == 0
        manifests = [verify(tmp_path / name / f"global_step_{step}") for step in (1, 2)]
        weights = [{file: e for file, e in m.files.items() if file.endswith(WEIGHTS)} for m in manifests]
        files.append(weights)
    assert files[0] == files[1] and len(files[0][1]) >= 2
