"""Checks before torch is imported: folders, logins, user code, positions."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.losses.policy import POLICY_LOSSES
from lockstep.config import reward
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.policy_loss import LOSS_NAMES
from lockstep.config.ppo import PPOConfig
from lockstep.observability.mlflow import MlflowTracker
from lockstep.observability.swanlab import SwanlabTracker
from lockstep.observability.wandb import WandbTracker
from lockstep.rewards.managers import REWARD_MANAGERS
from lockstep.trainer.run.checkpoint import RunLock
from lockstep.trainer.run.preflight import preflight

SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"


@pytest.fixture
def problems(overrides: list[str]) -> Any:
    return lambda *extra: preflight(load_config(PPOConfig, [*overrides, *extra]))


def test_a_good_run_has_no_problem_and_leaves_no_folder(problems: Any, tmp_path: Path) -> None:
    assert problems() == []
    assert not (tmp_path / "run").exists()


def test_messages_come_before_torch_is_imported(overrides: list[str], tmp_path: Path) -> None:
    """One process for several mistakes; torch would take seconds."""
    (tmp_path / "score.py").write_text("import helpers_that_do_not_exist\n")
    (tmp_path / "file").write_text("in the way")
    wrong = [
        f"custom_reward_function.path={tmp_path}/score.py",
        f"trainer.default_local_dir={tmp_path}/file/run",
        "data.max_response_length=300",
    ]
    code = (
        "import sys; from lockstep.trainer.main_ppo import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *overrides, *wrong], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error"] * 3
    assert "score.py, line 1: ModuleNotFoundError: No module named 'helpers_that_do_not_exist'" in done.stderr
    assert "is 340 tokens, but the model has 256 positions" in done.stderr
    assert "trainer.default_local_dir" in done.stderr


def test_folder_in_use(problems: Any, tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        (problem,) = problems()
    assert "is in use by a live run" in problem
    assert problems() == []


def test_another_experiment(problems: Any, tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_1"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"step": 1, "sequence": 1, "saved_at": 0, "files": {}}))
    (step / "config.yaml").write_text("actor_rollout_ref: {model: {path: /other/model}}\n")
    (problem,) = problems()
    assert "another experiment" in problem and "actor_rollout_ref.model.path was /other/model" in problem
    assert problems("trainer.resume_mode=disable") == []
    (problem,) = problems("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")
    assert f"trainer.resume_from_path={tmp_path} is not a checkpoint" in problem


def test_signatures_of_user_code(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "class Data:\n    def __init__(self, files): ...\n"
        "class Order:\n    def __init__(self, rows): ...\n"
        "def loss(log_prob, advantages): ...\n"
        "def manager(tokenizer): ...\n"
    )
    user = tmp_path / "user.py"
    found = problems(
        f"data.custom_cls.path={user}",
        "data.custom_cls.name=Data",
        f"data.sampler.class_path={user}",
        "data.sampler.class_name=Order",
        f"actor_rollout_ref.actor.policy_loss.loss_mode='{user}:loss'",
        f"reward_model.reward_manager='{user}:manager'",
    )
    text = "\n".join(found)
    assert len(found) == 4
    for key in (
        "data.custom_cls.path",
        "data.sampler.class_path",
        "policy_loss.loss_mode",
        "reward_model.reward_manager",
    ):
        assert key in text
    assert f"loss(log_prob, advantages) ({user}:5) cannot be called with (old_log_prob, log_prob" in text


def test_a_file_that_raises_is_named_with_its_line(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(f"{SCORE}\nTABLE = load_tabel()\n")
    (problem,) = problems(f"custom_reward_function.path={tmp_path}/score.py")
    assert "score.py, line 4: NameError: name 'load_tabel' is not defined" in problem


def test_names_and_inputs_are_checked_with_the_config(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def adv(token_level_rewards, response_mask, tokens): ...\n")
    wrong = [
        "actor_rollout_ref.actor.policy_loss.loss_mode=gsop",
        "reward_model.reward_manager=dapoo",
        f"algorithm.adv_estimator='{tmp_path}/mine.py:adv'",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*overrides, *wrong])
    assert "Did you mean 'gspo'" in str(caught.value) and "Did you mean 'dapo'" in str(caught.value)
    assert "no run computes tokens" in str(caught.value) and "token_level_rewards" in str(caught.value)
    assert set(POLICY_LOSSES) == LOSS_NAMES and set(REWARD_MANAGERS) == reward.REWARD_MANAGERS


def test_scorer_names(problems: Any) -> None:
    (problem,) = problems("custom_reward_function.path=null", "+custom_reward_function.reward_kwargs.scorer=gsm8")
    assert "no such scorer" in problem and "gsm8k" in problem


def test_positions(problems: Any) -> None:
    long = ("data.max_prompt_length=200", "data.max_response_length=100")
    (problem,) = problems(*long)
    assert "is 300 tokens, but the model has 256 positions" in problem
    assert problems(*long, "+actor_rollout_ref.model.override_config.max_position_embeddings=300") == []


def test_model_folder(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{not json")
    path = f"actor_rollout_ref.model.path={tmp_path}/model"
    assert "config.json cannot be read (Expecting property name" in problems(path)[0]
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "no weights (*.safetensors or *.bin) in the folder" in problems(path)[0]


def test_more_processes_than_cores(problems: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert problems("data.dataloader_num_workers=5000") == []
    assert "data.dataloader_num_workers=5000: this machine has" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"not logged in: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
    ):
        WandbTracker.check()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "0" * 40)
    WandbTracker.check()
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbTracker.check()


def test_swanlab_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lockstep.observability.swanlab.check_installed", lambda *names: None)
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "saved"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="swanlab login"):
        SwanlabTracker.check()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / ".netrc").write_text("machine api.swanlab.cn login user password secret")
    SwanlabTracker.check()


def test_mlflow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr("lockstep.observability.mlflow.check_installed", lambda *names: None)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("no_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        MlflowTracker.check()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="no server answers at MLFLOW_TRACKING_URI=http://127"):
        MlflowTracker.check()
    monkeypatch.setenv("NO_PROXY", "other.example")
    MlflowTracker.check()  # the proxy's matter


def test_missing_package(monkeypatch: pytest.MonkeyPatch, problems: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (problem,) = problems("trainer.logger=[console,wandb]")
    assert 'pip install "lockstep-rl[wandb]"' in problem


def test_a_reward_model_is_no_policy(problems: Any, tiny_run_files: Path, tmp_path: Path) -> None:
    """By its config, before torch is imported: a folder, a critic's checkpoint, and their adapter."""
    head = tmp_path / "first" / "global_step_3" / "critic" / "huggingface"
    shutil.copytree(tiny_run_files / "model", head)
    settings = json.loads((head / "config.json").read_text())
    architecture = {"architectures": ["Qwen2ForSequenceClassification"]}
    (head / "config.json").write_text(json.dumps(settings | architecture))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"task_type": "SEQ_CLS", "peft_type": "LORA"}))
    for path, kind in (
        (head, architecture["architectures"][0]),
        (head.parent, architecture["architectures"][0]),
        (adapter, "SEQ_CLS"),
    ):
        (problem,) = problems(f"actor_rollout_ref.model.path={path}")
        assert problem == (
            f"actor_rollout_ref.model.path={path} is a critic or reward model ({kind}), not a language model"
        )


def test_hint_of_another_experiment_with_lora(problems: Any, tmp_path: Path) -> None:
    """Adapters go on as adapters; a run without them starts from the merged weights."""
    step = tmp_path / "run" / "global_step_1"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"step": 1, "sequence": 1, "saved_at": 0, "files": {}}))
    (step / "config.yaml").write_text("actor_rollout_ref: {model: {path: /other/model, lora_rank: 8}}\n")
    hints = {8: "actor_rollout_ref.model.lora_adapter_path", 0: "actor_rollout_ref.model.path"}
    for rank, key in hints.items():
        (problem,) = problems(f"actor_rollout_ref.model.lora_rank={rank}")
        assert f"another trainer.default_local_dir and {key} set to one of its checkpoints (global_step_N)" in problem
