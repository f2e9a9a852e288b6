"""Every plug-in example trains: all of them in one run by path, and in one run by the names that they register."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep import api
from lockstep.registry import load_module, load_object
from lockstep.trainer.main_ppo import main
from tests.tiny import save_tiny_model, write_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
PLUGINS = EXAMPLES / "plugins"
BY_PATH = {
    "estimator": "algorithm.adv_estimator={}:median_baseline",
    "loss": "actor_rollout_ref.actor.policy_loss.loss_mode={}:near_policy",
    "scorer": "+custom_reward_function.reward_kwargs.scorer='{}:last_number'",
    "manager": "reward_model.reward_manager={}:TokenPenalty",
    "dataset": "data.custom_cls.path={}:WithInstruction",
    "tracker": "trainer.logger=[console,'{}:CsvTracker']",
    "rollout_engine": "actor_rollout_ref.rollout.name={}:PlainRollout",
    "training_engine": "actor_rollout_ref.actor.strategy={}:PlainEngine",
}
"""File -> the override in its docstring."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "model")


def check(run: Path) -> None:
    (row,) = api.read_metrics(run / "metrics.jsonl")
    assert row["actor/near_fraction"] == 1.0 and row["actor/grad_norm"] > 0
    assert row["critic/score/mean"] == pytest.approx(
        row["reward/unshaped/mean"] - 0.01 * row["response_length/mean"], abs=1e-6
    )
    assert row["prompt_length/min"] > len("Be brief.")
    assert (run / "scores.csv").read_text() == f"1,{row['critic/score/mean']}\n"


@pytest.mark.usefixtures("no_registrations")
def test_plugins_by_path(model: Path, tmp_path: Path) -> None:
    assert sorted(BY_PATH) == sorted(file.stem for file in PLUGINS.glob("*.py"))
    write_rows(tmp_path / "train.jsonl", 4, data_source="anything")
    overrides = [template.format(PLUGINS / f"{name}.py") for name, template in BY_PATH.items()]
    for name, template in BY_PATH.items():
        documented = template.format(f"examples/plugins/{name}.py").replace("'", "").removeprefix("+")
        assert documented in (PLUGINS / f"{name}.py").read_text()
    small = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=16"]
    small += ["data.max_prompt_length=60", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=1"]
    small += ["+reward_model.reward_kwargs.cost=0.01", "trainer.device=cpu", "reward_model.timeout_s=null"]
    paths = [f"data.train_files={tmp_path}/train.jsonl", f"actor_rollout_ref.model.path={model}"]
    assert main([*overrides, *small, *paths, f"trainer.default_local_dir={tmp_path}/run"]) == 0
    check(tmp_path / "run")


@pytest.mark.usefixtures("no_registrations")
def test_plugins_by_registered_name(model: Path, tmp_path: Path) -> None:
    for name in ("loss", "scorer", "manager", "tracker"):
        load_module(str(PLUGINS / f"{name}.py"))
    lockstep.train(
        model,
        [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "data_source": "example/sums"} for i in range(4)],
        algorithm="median_baseline",
        run_dir=tmp_path / "run",
        steps=1,
        batch_size=4,
        n=4,
        max_prompt_length=60,
        max_response_length=16,
        config={
            "trainer": {"device": "cpu", "logger": ["csv"]},
            "actor_rollout_ref.actor.policy_loss.loss_mode": "near_policy",
            "actor_rollout_ref.model.external_lib": PLUGINS / "estimator.py",
            "reward_model": {"reward_manager": "token_penalty", "reward_kwargs": {"cost": 0.01}, "timeout_s": None},
            "data.custom_cls.path": load_object(f"{PLUGINS / 'dataset.py'}:WithInstruction"),
        },
    )
    check(tmp_path / "run")


@pytest.mark.usefixtures("no_registrations")
def test_estimator_subtracts_the_median() -> None:
    median_baseline = load_object(f"{PLUGINS / 'estimator.py'}:median_baseline")
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 5.0], [2.0, 0.0]]), torch.tensor([[1, 1], [1, 1], [1, 0]])
    advantages, _ = median_baseline(rewards, mask, index=["a", "a", "a"])
    assert advantages.tolist() == [[-1.0, -1.0], [3.0, 3.0], [0.0, 0.0]]
    halved, _ = median_baseline(rewards, mask, index=["a", "a", "a"], scale=0.5)
    assert torch.equal(halved, 0.5 * advantages)


@pytest.fixture
def small_train(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lockstep.train on the tiny model, with one small step."""

    def small(*arguments: Any, **keywords: Any) -> lockstep.TrainResult:
        names = ("model", "data", "reward", "algorithm")
        changes = {
            "model": model,
            "steps": 1,
            "batch_size": 4,
            "n": 2,
            "max_prompt_length": 64,
            "max_response_length": 6,
        }
        keywords |= dict(zip(names, arguments)) | changes | {"run_dir": tmp_path / "run", "trainer.device": "cpu"}
        return api.train(**keywords)

    monkeypatch.setattr(lockstep, "train", small, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small_train")
def test_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train_from_python.py", "a model"])
    runpy.run_path(str(EXAMPLES / "train_from_python.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "critic/score/mean" in printed and f"run folder: {tmp_path}/run" in printed


@pytest.mark.usefixtures("small_train")
def test_documented_program_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = (EXAMPLES.parent / "docs" / "python_api.md").read_text().split("```python\n")[1].split("```")[0]
    exec(program, {"__name__": "__main__"})
    assert "critic/score/mean" in capsys.readouterr().out and (tmp_path / "adder" / "config.json").is_file()
