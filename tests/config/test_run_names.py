"""Default names of a run: what they are made of, that they are stable and legal, and the notice about earlier ones."""

from pathlib import Path

import pytest
import yaml

from lockstep.config.compose import load_config, log_once
from lockstep.config.ppo import PPOConfig
from lockstep.config.run_names import data_name, experiment_name, model_name, project_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", "Qwen2.5-0.5B-Instruct"),
        ("org/name@refs/pr/3", "name"),
        ("./a@b/c", "c"),
        ("/models/SmolLM2-135M/", "SmolLM2-135M"),
        ("hdfs://host:9000/models/qwen", "qwen"),
        ("/cache/models--Qwen--Qwen2.5-0.5B/snapshots/060db6", "Qwen2.5-0.5B"),
        ("runs/first/global_step_20/actor/huggingface", "first-step20"),
        ("runs/first/global_step_20", "first-step20"),
        ("./model", "model"),
    ],
)
def test_model_name(path: str, name: str) -> None:
    assert model_name(path) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/gsm8k/train.parquet", "gsm8k"),
        ("~/data/gsm8k/train-00000-of-00001.parquet", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("openai/gsm8k@refs/convert/parquet:main:train", "gsm8k"),
        ("Maxwell-Jia/AIME_2024", "AIME_2024"),
        ("s3://bucket/math/data/part-0003.jsonl.gz", "math"),
        ("dapo-math-17k.parquet", "dapo-math-17k"),
        ("train.parquet", "train"),
    ],
)
def test_data_name(path: str, name: str) -> None:
    assert data_name(path) == name


def test_names_are_legal_and_distinguish_what_they_are_made_of() -> None:
    assert experiment_name("Qwen/Qwen2.5-0.5B", ["a/gsm8k/train.parquet"], "grpo") == "qwen2.5-0.5b-gsm8k-grpo"
    assert experiment_name("m", "gsm8k/train.parquet", "gae") == "m-gsm8k-ppo"
    assert experiment_name("m", "d/x.parquet", "/my/centred.py:centred") == "m-x-centred"
    assert project_name(["a/x.parquet", "a/y.parquet", "a/x.parquet"]) == "x-y"
    assert project_name(["x.parquet", "y.parquet", "z.parquet", "w.parquet"]) == "x-y-2-more"
    assert (project_name([]), experiment_name(None, None, "grpo")) == ("lockstep", "grpo")
    odd = experiment_name("模型 (v1)/..hidden: *?", "d" * 400, "grpo")
    assert "/" not in odd and len(odd.encode()) < 255 and not odd.startswith(".") and " " not in odd


def test_config_derives_only_what_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_MODEL", "/models/Tiny")
    command = [
        "algorithm=grpo",
        "actor_rollout_ref.model.path=${oc.env:MY_MODEL}",
        "data.train_files=d/gsm8k/train.parquet",
    ]
    trainer = load_config(PPOConfig, command, run_checks=False).trainer
    assert trainer.default_local_dir == "checkpoints/gsm8k/tiny-gsm8k-grpo"
    assert load_config(PPOConfig, command, run_checks=False).trainer == trainer
    named = load_config(PPOConfig, [*command, "trainer.experiment_name=mine"], run_checks=False).trainer
    assert named.default_local_dir == "checkpoints/gsm8k/mine"
    own = load_config(
        PPOConfig, [*command, "trainer.default_local_dir='runs/${trainer.experiment_name}'"], run_checks=False
    )
    assert own.trainer.default_local_dir == "runs/tiny-gsm8k-grpo"


def test_validation_of_a_run_has_the_name_of_its_training() -> None:
    files = ["actor_rollout_ref.model.path=m", "data.val_files=v/math.parquet", "trainer.val_only=true"]
    assert load_config(PPOConfig, files, run_checks=False).trainer.project_name == "math"
    both = load_config(PPOConfig, [*files, "data.train_files=t/gsm8k.parquet"], run_checks=False)
    assert both.trainer.project_name == "gsm8k"


def test_checkpoints_in_the_earlier_default_folder_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    command = ["algorithm=grpo", "actor_rollout_ref.model.path=model", "data.train_files=rows.jsonl"]

    def notices() -> str:
        log_once.cache_clear()
        caplog.clear()
        load_config(PPOConfig, command)
        return caplog.text

    assert "earlier" not in notices()
    old = tmp_path / "checkpoints/lockstep_examples/gsm8k"
    (old / "global_step_5").mkdir(parents=True)
    saved = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"path": "model"}},
        "data": {"train_files": ["rows.jsonl"]},
    }
    (old / "config.yaml").write_text(yaml.safe_dump(saved))
    assert "set trainer.default_local_dir=checkpoints/lockstep_examples/gsm8k to continue" in notices()
    (old / "config.yaml").write_text(yaml.safe_dump(saved | {"algorithm": {"adv_estimator": "gae"}}))
    assert "earlier" not in notices()
