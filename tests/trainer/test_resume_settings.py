"""Resuming with other settings or other data: changes are applied and reported, or refused; nothing is ignored in silence."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import to_plain
from lockstep.observability.trackers import Tracking
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run.checkpoint import CheckpointStore
from lockstep.trainer.run.run_config import check_same_experiment, read_config, report_changes, write_run_config
from lockstep.utils import files as files_module
from tests.tiny import write_rows

pytestmark = pytest.mark.first

LR = "actor_rollout_ref.actor.optim.lr"
DECAY = "actor_rollout_ref.actor.optim.weight_decay"
COEF = "algorithm.kl_ctrl.kl_coef"


@pytest.fixture(scope="module")
def saved_run(tiny_run_files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The command of a run of 3 steps that saves each, and its finished folder."""
    files, run = tiny_run_files, tmp_path_factory.mktemp("saved") / "run"
    shutil.copy(files / "train.parquet", run.parent / "train.parquet")
    command = [
        f"data.train_files={run.parent}/train.parquet",
        f"data.val_files={files}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={files}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{LR}=1e-3",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.rollout.n=2",
        f"custom_reward_function.path={files}/reward.py",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=true",
        f"{COEF}=0.1",
        "trainer.logger=console",
        "trainer.device=cpu",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
    ]
    assert main([*command, f"trainer.default_local_dir={run}"]) == 0
    return command, run


@pytest.fixture
def at_step_2(saved_run: tuple[list[str], Path], tmp_path: Path) -> Path:
    """A copy of the run's folder as it was after step 2."""
    run = tmp_path / "run"
    shutil.copytree(saved_run[1], run)
    shutil.rmtree(run / "global_step_3")
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    return run


def resume(saved_run: tuple[list[str], Path], run: Path, *changes: str) -> int:
    return main([*saved_run[0], f"trainer.default_local_dir={run}", *changes])


def step_3(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[2])


def test_unchanged_settings_are_not_reported(
    saved_run: tuple[list[str], Path], at_step_2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = step_3(at_step_2)
    assert resume(saved_run, at_step_2) == 0
    assert "changed since the checkpoint" not in caplog.text and "has no" not in caplog.text
    assert step_3(at_step_2)["actor/lr"] == before["actor/lr"]
    assert step_3(at_step_2)["actor/pg_loss"] == before["actor/pg_loss"]
    assert [path.name for path in sorted((at_step_2 / "configs").iterdir())] == ["001_step_0.yaml", "002_step_2.yaml"]


def test_changed_settings_are_applied_and_reported(
    saved_run: tuple[list[str], Path], at_step_2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = step_3(at_step_2)
    assert before["actor/lr"] < 1e-3  # the schedule has begun
    assert before["actor/reward_kl_penalty_coeff"] == 0.1
    assert resume(saved_run, at_step_2, f"{LR}=2e-3", f"{COEF}=0.2", f"{DECAY}=0.5") == 0
    after = step_3(at_step_2)
    assert after["actor/lr"] == pytest.approx(2 * before["actor/lr"])
    assert after["actor/reward_kl_penalty_coeff"] == 0.2
    for line in (f"{LR} was 0.001, is now 0.002", f"{COEF} was 0.1, is now 0.2", f"{DECAY} was 0.01, is now 0.5"):
        assert f"changed since the checkpoint: {line}\n" in caplog.text

    configs = {path.name: yaml.safe_load(path.read_text()) for path in (at_step_2 / "configs").iterdir()}
    rates = {name: config["actor_rollout_ref"]["actor"]["optim"]["lr"] for name, config in configs.items()}
    assert rates == {"001_step_0.yaml": 1e-3, "002_step_2.yaml": 2e-3}
    assert yaml.safe_load((at_step_2 / "config.yaml").read_text()) == configs["002_step_2.yaml"]
    saved = yaml.safe_load((at_step_2 / "global_step_2/config.yaml").read_text())
    assert saved["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-3


def test_adaptive_coefficient_continues_from_the_checkpoint(
    saved_run: tuple[list[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adaptive = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=10"]
    assert resume(saved_run, tmp_path / "run", *adaptive, "trainer.total_training_steps=2") == 0
    assert resume(saved_run, tmp_path / "run", *adaptive, f"{COEF}=7") == 0
    assert step_3(tmp_path / "run")["actor/reward_kl_penalty_coeff"] < 0.1
    assert f"{COEF} was 0.1, is now 7.0 (the adaptive controller continues from" in caplog.text
    caplog.clear()
    shutil.rmtree(tmp_path / "run/global_step_3")
    assert resume(saved_run, tmp_path / "run", f"{COEF}=7") == 0  # fixed
    assert step_3(tmp_path / "run")["actor/reward_kl_penalty_coeff"] == 7


def test_replaced_data_file_is_refused(saved_run: tuple[list[str], Path], at_step_2: Path, capsys: Any) -> None:
    train = saved_run[1].parent / "train.parquet"
    kept = train.read_bytes()
    write_rows(train, 16, data_source="lighteval/MATH")  # as many rows
    try:
        assert resume(saved_run, at_step_2) == 2
    finally:
        train.write_bytes(kept)
    error = capsys.readouterr().err
    assert f"the content of {train} has changed" in error and "trainer.resume_mode=disable" in error
    assert resume(saved_run, at_step_2) == 0


@pytest.mark.parametrize("content", [b"", b"a: [1", b"- 1", b"\xff\xfe\x00", b"a: !!python/name:os.system"])
def test_unreadable_config_is_a_warning(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    check_same_experiment(tmp_path, PPOConfig())
    assert f"{tmp_path}/config.yaml cannot be read" in caplog.text


def test_run_resumes_with_an_unreadable_config(
    saved_run: tuple[list[str], Path], at_step_2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (at_step_2 / "config.yaml").write_text("a: [1")
    assert resume(saved_run, at_step_2) == 0
    assert yaml.safe_load((at_step_2 / "config.yaml").read_text())["trainer"]["total_training_steps"] == 3


def test_config_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_config(tmp_path, PPOConfig(), step=0)
    before = (tmp_path / "config.yaml").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("power failure")

    monkeypatch.setattr(files_module.os, "fsync", fail)
    with pytest.raises(OSError, match="power failure"):
        write_run_config(tmp_path, PPOConfig(), step=1)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
@pytest.mark.parametrize("held", [["model", "extra"], ["model"]])
def test_parts_that_were_not_saved_are_named(
    held: list[str], saved_run: tuple[list[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "actor_rollout_ref.actor.checkpoint.save_contents"
    contents = f"{key}=[{','.join(held)}]"
    assert resume(saved_run, tmp_path / "run", contents, "trainer.total_training_steps=1") == 0
    assert resume(saved_run, tmp_path / "run", contents, "trainer.total_training_steps=2") == 0
    assert f"global_step_1 has no optimizer of the actor, which was saved with {contents}" in caplog.text
    assert ("has no extra of the actor" in caplog.text) == ("extra" not in held)


def test_folder_of_a_killed_run_is_mended(
    saved_run: tuple[list[str], Path],
    at_step_2: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, pid = at_step_2, os.getppid()  # a live process that has nothing to do with the run
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    (run / "global_step_1").rename(run / f".replaced-global_step_1-{pid}")
    (run / f".staging-global_step_3-{pid}").mkdir()
    (run / f".config.yaml.{pid}-0123abcd.tmp").write_text("half")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]))
    events: list[str] = []
    sync, save = Tracking.sync, CheckpointStore.stage
    monkeypatch.setattr(Tracking, "sync", lambda self: (events.append("sync"), sync(self))[1])
    monkeypatch.setattr(CheckpointStore, "stage", lambda self, *args: (events.append("save"), save(self, *args))[1])
    assert resume(saved_run, run) == 0
    assert events == ["sync", "save"]
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == [".run.lock"]
    assert (run / "global_step_1/manifest.json").is_file()
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "3"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]  # the line of step 2 is in its checkpoint


def test_report_names_keys_that_only_one_side_has(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    report_changes({"data": {"removed": 1}}, PPOConfig(), tmp_path)
    assert "data.removed was 1, is now unset" in caplog.text
    assert "trainer.resume_mode" not in caplog.text


TRACKER = """
class Tracker:
    def __init__(self, run):
        (run.run_dir / "tracked.txt").write_text(str(run.config))

    def log(self, data, step): ...
    def log_table(self, name, columns, rows, step): ...
    def finish(self): ...
"""


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
def test_values_of_environment_variables_are_in_no_file(
    saved_run: tuple[list[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A secret is used, saved as it was written, and may be another one when the run is resumed."""
    (tmp_path / "tracker.py").write_text(TRACKER)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, key):\n"
        f"    open({str(tmp_path / 'used')!r}, 'a').write(key)\n"
        "    return sum(map(ord, solution_str)) % 7 / 7\n"
    )
    own = [
        f"custom_reward_function.path={tmp_path}/reward.py",
        "+custom_reward_function.reward_kwargs.key=${oc.env:REWARD_KEY}",
        f"trainer.logger=[console,'{tmp_path}/tracker.py:Tracker']",
    ]
    run = tmp_path / "run"
    for step, secret in enumerate(("first-s3cret", "second-s3cret"), start=1):
        monkeypatch.setenv("REWARD_KEY", secret)
        assert resume(saved_run, run, *own, f"trainer.total_training_steps={step}") == 0
        assert secret in (tmp_path / "used").read_text()
    holding = [path for path in run.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert holding == [] and "s3cret" not in caplog.text
    saved = [
        "config.yaml",
        "configs/001_step_0.yaml",
        "global_step_1/config.yaml",
        "global_step_2/config.yaml",
        "tracked.txt",
    ]
    assert all("${oc.env:REWARD_KEY}" in (run / name).read_text() for name in saved)
    assert "changed since the checkpoint: custom_reward_function" not in caplog.text
    caplog.clear()
    shutil.rmtree(run / "global_step_2")
    monkeypatch.setenv("REWARD_KEY", "plain")
    assert resume(saved_run, run, *own, own[1].partition("=")[0] + "=plain", "trainer.total_training_steps=2") == 0
    assert "changed since the checkpoint: custom_reward_function" not in caplog.text, "the value is the same"


def test_a_setting_that_is_an_environment_variable_now(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The log shows neither the old value, which may be the secret itself, nor the new one."""
    os.environ["LOCKSTEP_TEST_KEY"] = "new-s3cret"
    try:
        config = load_config(
            PPOConfig, ["+custom_reward_function.reward_kwargs.key=${oc.env:LOCKSTEP_TEST_KEY}"], run_checks=False
        )
    finally:
        del os.environ["LOCKSTEP_TEST_KEY"]
    saved = to_plain(config)
    saved["custom_reward_function"]["reward_kwargs"] = {"key": "old-s3cret"}
    report_changes(saved, config, tmp_path)
    assert "reward_kwargs.key was another value, is now ${oc.env:LOCKSTEP_TEST_KEY}" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_variable_with_another_value_is_another_setting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its text is the same, and the value is in no file: a digest tells."""
    written = ["actor_rollout_ref.model.path=/${oc.env:LOCKSTEP_M}", f"{LR}=${{oc.env:LOCKSTEP_LR}}"]

    def config_with(model: str, lr: str) -> PPOConfig:
        monkeypatch.setenv("LOCKSTEP_M", model)
        monkeypatch.setenv("LOCKSTEP_LR", lr)
        return load_config(PPOConfig, written, run_checks=False)

    write_run_config(tmp_path, config_with("one-model", "1e-6"), 0)
    text = (tmp_path / "config.yaml").read_text()
    assert "path: /${oc.env:LOCKSTEP_M}" in text and "1e-06" not in text
    saved = read_config(tmp_path / "config.yaml")
    check_same_experiment(tmp_path, config_with("one-model", "1e-5"), saved)
    report_changes(saved, config_with("one-model", "1e-5"), tmp_path)
    assert f"changed since the checkpoint: the value of {LR}=${{oc.env:LOCKSTEP_LR}}" in caplog.text
    with pytest.raises(ValueError, match=r"model\.path=/\$\{oc\.env:LOCKSTEP_M\} has another value than before"):
        check_same_experiment(tmp_path, config_with("another", "1e-6"), saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [[f"{LR}=7e-3"], [f"{LR}=7e-3", "trainer.total_training_steps=2"], ["trainer.val_only=true"]]
)
def test_a_start_that_trains_nothing_keeps_the_config(
    changes: list[str], saved_run: tuple[list[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved_run[1], run)
    before = {path: path.read_bytes() for path in [run / "config.yaml", *(run / "configs").iterdir()]}
    (run / "metrics.jsonl").unlink()  # so that the run is not known to be finished before its model is loaded
    assert resume(saved_run, run, *changes) == 0
    assert {path: path.read_bytes() for path in [run / "config.yaml", *(run / "configs").iterdir()]} == before


def test_new_run_folders_are_private(saved_run: tuple[list[str], Path], tmp_path: Path) -> None:
    assert saved_run[1].stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    dumps = f"trainer.rollout_data_dir={tmp_path}/dumps"
    assert resume(saved_run, shared, dumps, "trainer.total_training_steps=1") == 0
    assert shared.stat().st_mode & 0o777 == 0o755, "the user's choice"
    assert (tmp_path / "dumps").stat().st_mode & 0o777 == 0o700
