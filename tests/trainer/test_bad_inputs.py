"""User errors on the command line: each exits with a message that names the key, without a traceback."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from lockstep.trainer.main_ppo import main
from tests.programs import Program
from tests.tiny import write_rows


def error_of(overrides: list[str], capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    """The message of a command that must exit with code 2."""
    try:
        code = main([*overrides, *extra])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    return err


def rows_without(path: Path, key: str) -> Path:
    write_rows(path)
    pd.read_parquet(path).drop(columns=[key]).to_parquet(path)
    return path


def test_data_files(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message_for(path: Path) -> str:
        return error_of(overrides, capsys, f"data.train_files={path}")

    message = message_for(tmp_path / "nowhere.parquet")
    assert "data.train_files" in message and "no such file" in message
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in message_for(tmp_path / "empty.jsonl")
    message = message_for(rows_without(tmp_path / "no_prompt.parquet", "prompt"))
    assert "'prompt'" in message and "no_prompt.parquet" in message
    for key, problem in {
        "data_source": "no scorer for data_source 'default'",
        "reward_model": "has no ground truth",
    }.items():
        files = rows_without(tmp_path / f"no_{key}.parquet", key)  # enough for a reward function of one's own
        message = error_of(overrides, capsys, f"data.train_files={files}", "custom_reward_function.path=null")
        assert problem in message and f"no_{key}.parquet" in message
    (tmp_path / "broken.jsonl").write_text('{"prompt": [\n')
    assert "broken.jsonl" in message_for(tmp_path / "broken.jsonl")


def test_ground_truths_of_mixed_types(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl", 8).read_text().splitlines()]
    lines[3]["reward_model"]["ground_truth"] = 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "ground_truth" in error_of(overrides, capsys, f"data.train_files={tmp_path}/rows.jsonl")


def test_prompt_longer_than_allowed(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(overrides, capsys, "data.max_prompt_length=5")
    assert "data.max_prompt_length" in message and "data.truncation" in message


def test_model_folders(
    overrides: list[str], tiny_run_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message_for(path: Path) -> str:
        return error_of(overrides, capsys, f"actor_rollout_ref.model.path={path}")

    assert "actor_rollout_ref.model.path" in message_for(tmp_path / "nowhere")
    (tmp_path / "not_a_model").mkdir()
    assert "config.json" in message_for(tmp_path / "not_a_model")
    copy = Path(shutil.copytree(tiny_run_files / "model", tmp_path / "copy"))
    (copy / "model.safetensors").write_bytes(b"not weights")
    assert "cannot be loaded" in message_for(copy)


def test_tokenizer_without_a_chat_template(
    overrides: list[str], tiny_run_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny_run_files / "model", tmp_path / "copy"))
    (copy / "chat_template.jinja").unlink()
    message = error_of(overrides, capsys, f"actor_rollout_ref.model.path={copy}")
    assert "chat template" in message and "custom_chat_template" in message


def test_reward_functions(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message_for(text: str, *extra: str) -> str:
        (tmp_path / "r.py").write_text(text)
        return error_of(overrides, capsys, f"custom_reward_function.path={tmp_path}/r.py", *extra)

    assert "compute_score" in message_for("def compute_scores(**kw):\n    return 0\n")
    assert "ground_truth" in message_for("def compute_score(data_source, solution_str):\n    return 0\n")
    assert "SyntaxError" in message_for("def compute_score(:\n")


def test_nan_reward_stops_the_run(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    (tmp_path / "nan.py").write_text(signature + "    return float('nan')\n")
    assert main([*overrides, f"custom_reward_function.path={tmp_path}/nan.py", "trainer.val_before_train=false"]) == 1
    err = capsys.readouterr().err
    assert "the score nan; it must be a finite number" in err and "Traceback" not in err
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()


def test_data_source_without_a_scorer(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.trainer.ppo.ray_trainer.PPOTrainer.init_workers", pytest.fail)  # loads the models
    plain = [*overrides, "custom_reward_function.path=null"]
    files = write_rows(tmp_path / "mine.jsonl", data_source="openai/gsm8kk")
    message = error_of(plain, capsys, f"data.train_files={files}")
    assert message.startswith(
        f"error: {files}, row 0: no scorer for data_source 'openai/gsm8kk'. Did you mean 'openai/gsm8k'?"
    )
    assert "Known: " in message and "math_dapo" in message and "custom_reward_function.path" in message
    assert len(message.splitlines()) == 1
    rows = [json.loads(line) | {"reward_model": {"style": "model"}} for line in files.read_text().splitlines()]
    files.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "set reward_model.enable=true" in error_of(plain, capsys, f"data.val_files={files}")


def test_rows_for_agents(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_rows(tmp_path / "mine.jsonl")
    files.write_text(
        "".join(json.dumps(json.loads(line) | {"agent_name": "tool_agent"}) + "\n" for line in files.open())
    )
    message = error_of(overrides, capsys, f"data.train_files={files}")
    assert f"{files}, row 0: agent_name='tool_agent' needs" in message and "multi_turn.tool_config_path" in message


def test_another_experiment_in_the_folder(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    short = [*overrides, "trainer.val_before_train=false", "trainer.total_training_steps=1"]
    assert main([*short, "algorithm.adv_estimator=reinforce_plus_plus"]) == 0
    message = error_of(short, capsys, "algorithm.adv_estimator=remax")
    assert "another experiment: algorithm.adv_estimator was reinforce_plus_plus and is remax" in message
    assert "trainer.default_local_dir" in message and "trainer.resume_mode=disable" in message


def test_two_runs_in_one_folder(overrides: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from lockstep.trainer.run.checkpoint import RunLock

    with RunLock(tmp_path / "run"):
        message = error_of(overrides, capsys)
    assert "trainer.default_local_dir" in message and str(os.getpid()) in message


def test_folder_that_is_not_writable(overrides: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = error_of(overrides, capsys, f"trainer.default_local_dir={tmp_path}/file/run")
    assert "trainer.default_local_dir" in message


def test_full_disk_keeps_the_earlier_checkpoint(overrides: list[str], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(small)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        settings = ["trainer.save_freq=1", "trainer.val_before_train=false", "trainer.total_training_steps=4"]
        command = [*overrides, f"trainer.default_local_dir={small}/run", *settings]
        program = Program("lockstep.trainer.main_ppo", command, tmp_path)  # an open file would keep the disk mounted
        assert program.wait() not in (0, 2)
        assert "trainer.default_local_dir" in program.stderr and "No space left" in program.stderr
        assert (small / "run" / "global_step_1" / "manifest.json").is_file()
        assert not list((small / "run").glob(".staging*"))
    finally:
        subprocess.run(["umount", str(small)], check=True)
