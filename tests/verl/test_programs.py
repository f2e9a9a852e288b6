"""Programs written on verl run on Lockstep after the documented substitution of their imports."""

import importlib.util
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lockstep.protocol import DataProto
from lockstep.trainer.run.errors import RunError
from lockstep.verl._config import default_tree
from lockstep.verl.trainer.main_ppo import TaskRunner, run_ppo
from lockstep.verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from lockstep.verl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.tiny import save_tiny_model, small_run, write_rows

ROOT = Path(__file__).parents[2]
SUBSTITUTIONS = [(r"\bverl\.", "lockstep.verl."), (r"\b(from|import) verl\b", r"\1 lockstep.verl")]
"""Those of the sed command in docs/migrate_from_verl.md."""


def ported(name: str, folder: Path) -> Path:
    """The program with its imports substituted."""
    text = (ROOT / "examples" / "verl_programs" / name).read_text()
    assert "lockstep" not in text
    for before, after in SUBSTITUTIONS:
        text = re.sub(before, after, text)
    path = folder / name
    path.write_text(text)
    return path


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ported_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pytestmark = [pytest.mark.first, pytest.mark.usefixtures("no_registrations")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl_programs")
    save_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", 8)
    write_rows(folder / "val.parquet", 2)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(set(solution_str)) / 10\n"
    )
    return folder


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_documented_command_is_the_substitution_of_these_tests() -> None:
    page = (ROOT / "docs" / "migrate_from_verl.md").read_text()
    (command,) = re.findall(r"sed -E -i '(.*?)'", page)
    rules = [rule.split("/")[1:3] for rule in command.split("; ")]
    assert [tuple(rule) for rule in rules] == SUBSTITUTIONS


def test_reward_manager_and_task_runner(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [
        *small_run(files),
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.load_format=dummy_dtensor",  # a key of verl without effect here
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={tmp_path}/run",
        "+format_penalty=0.25",  # a key of the program
        f"hydra.run.dir={tmp_path}/hydra",
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled",
    ]
    monkeypatch.setattr(sys, "argv", ["main", *settings])
    try:
        runpy.run_path(str(ported("format_reward_main.py", tmp_path)), run_name="__main__")
    finally:
        GlobalHydra.instance().clear()
    before, after = metrics_of(tmp_path / "run")
    assert 0 <= before["val-aux/openai/gsm8k/well_formed/mean@1"] <= 1
    assert after["actor/grad_norm"] > 0 and "reward/well_formed/mean" in after
    assert after["critic/score/min"] >= -0.25  # the penalty of the command line


@pytest.mark.slow
def test_trainer_with_its_own_fit(files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = load(ported("length_trainer.py", tmp_path))
    config = OmegaConf.create(default_tree())
    changes = [
        *small_run(files),
        "algorithm.adv_estimator=short_grpo",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    config = OmegaConf.merge(config, OmegaConf.from_dotlist(changes))
    program.run_ppo(config, task_runner_class=program.LengthTaskRunner)
    start, first, second = metrics_of(tmp_path / "run")
    assert not [line for line in caplog.messages if "ignores these settings" in line]  # keys of verl that nobody set
    assert start["val/prompts"] == 2
    for row in (first, second):
        assert row["actor/grad_norm"] > 0 and row["actor/kl_loss"] >= 0 and row["timing_s/gen"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
    assert (tmp_path / "run" / "global_step_2" / "actor" / "huggingface").is_dir()

    OmegaConf.update(config, "trainer.total_training_steps", 3)
    program.run_ppo(config, task_runner_class=program.LengthTaskRunner)  # resumes after step 2
    assert [row["step"] for row in metrics_of(tmp_path / "run")][-1] == 3


def config_of(files: Path, *changes: str) -> Any:
    given = [*small_run(files), "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", *changes]
    return OmegaConf.merge(OmegaConf.create(default_tree()), OmegaConf.from_dotlist(given))


def test_inputs_are_checked_before_the_task_runner_starts(files: Path, tmp_path: Path) -> None:
    class Unreached(TaskRunner):
        def run(self, config: Any) -> Any:
            raise AssertionError("started")

    (tmp_path / "bad.py").write_text("def compute_score(a, b):\n    return 0\n")
    folder = f"trainer.default_local_dir={tmp_path}/run"
    with pytest.raises(RunError, match="custom_reward_function"):
        run_ppo(config_of(files, folder, f"custom_reward_function.path={tmp_path}/bad.py"), Unreached)
    shutil.copytree(files / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(RunError, match="no weights"):
        run_ppo(config_of(files, folder, f"actor_rollout_ref.model.path={tmp_path}/model"), Unreached)


def test_a_registered_loss_and_estimator_have_settings(files: Path, tmp_path: Path) -> None:
    """verl's signatures with keyword-only parameters; the values are checked first, and are in the config too."""
    seen: list[Any] = []

    @register_policy_loss("softened")
    def softened(  # type: ignore[no-untyped-def]
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights=None,
        *,
        beta: float,
    ):
        seen.append((beta, config.policy_loss.loss_kwargs))
        return agg_loss(-beta * advantages * log_prob, response_mask, loss_agg_mode), {}

    @register_adv_est("scaled")
    def scaled(token_level_rewards, response_mask, config=None, *, scale: int = 1, **kwargs):  # type: ignore[no-untyped-def]
        seen.append((scale, dict(config.adv_kwargs)))
        return scale * token_level_rewards * response_mask, token_level_rewards

    loss = "actor_rollout_ref.actor.policy_loss"
    changes = [f"trainer.default_local_dir={tmp_path}/run", "trainer.total_training_steps=1"]
    changes += ["algorithm.adv_estimator=scaled", f"{loss}.loss_mode=softened", "algorithm.adv_kwargs.scale=3"]
    with pytest.raises(ValueError, match=r"loss_kwargs\.beta: must be set; softened needs it"):
        run_ppo(config_of(files, *changes))
    run_ppo(config_of(files, *changes, f"{loss}.loss_kwargs.beta=1"))
    assert seen[0] == (3, {"scale": 3}) and seen[-1] == (1.0, {"beta": 1.0}) and len(seen) > 2
    assert metrics_of(tmp_path / "run")[-1]["actor/grad_norm"] > 0


def test_rows_are_checked(files: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 4, data_source="mine")
    changes = [f"data.train_files={rows}", f"trainer.default_local_dir={tmp_path}/run"]
    with pytest.raises(ValueError, match=r"rows.jsonl.*no scorer for data_source 'mine'"):
        run_ppo(config_of(files, *changes, "custom_reward_function.path=null"))
    rows.write_text(rows.read_text().replace('"ability"', '"agent_name": "tool_agent", "ability"'))
    with pytest.raises(ValueError, match=r"rows.jsonl.*agent_name='tool_agent'"):
        run_ppo(config_of(files, *changes))


LOOP = """
from lockstep.agents.loops import AgentLoop

class TwoTurns(AgentLoop):
    async def run(self, conversation):
        await conversation.generate(stop_token_ids=range(259))
        conversation.add([{"role": "user", "content": "again"}])
        await conversation.generate(stop_token_ids=range(259))
"""


@pytest.mark.usefixtures("no_registrations")
def test_rows_are_served_by_their_agents(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trainer's loop, and if a program calls the rollout itself."""
    (tmp_path / "loop.py").write_text(LOOP)
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:TwoTurns"
    changes = [f"trainer.default_local_dir={tmp_path}/run", loop, "data.max_response_length=60"]
    fit, found = RayPPOTrainer.fit, []

    def asks(self: RayPPOTrainer) -> Any:
        prompts = DataProto.from_single_dict(next(iter(self.train_dataloader)))
        found.append(self.async_rollout_manager.generate_sequences(prompts))
        return fit(self)

    monkeypatch.setattr(RayPPOTrainer, "fit", asks)
    run_ppo(config_of(files, *changes, "trainer.total_training_steps=1"))
    assert metrics_of(tmp_path / "run")[-1]["num_turns/mean"] == 4
    assert list(found[0].non_tensor_batch["__num_turns__"]) == [4] * 4


def test_settings_of_single_requests_are_refused(files: Path, tmp_path: Path) -> None:
    folder = f"trainer.default_local_dir={tmp_path}/run"
    for setting in ("trainer.async_mode=colocated", "actor_rollout_ref.rollout.over_sample_rate=0.2"):
        with pytest.raises(ValueError, match=f"{setting}: programs written for verl generate whole batches"):
            run_ppo(config_of(files, folder, setting))


def test_validation_needs_no_training_data(files: Path, tmp_path: Path) -> None:
    folder = f"trainer.default_local_dir={tmp_path}/run"
    run_ppo(config_of(files, folder, "data.train_files=/no/such.parquet", "trainer.val_only=true"))
    (row,) = metrics_of(tmp_path / "run")
    assert row["step"] == 0 and "val-core/openai/gsm8k/reward/mean@1" in row


def test_data_processing(files: Path, tmp_path: Path) -> None:
    program = load(ported("filter_rollouts.py", tmp_path))
    result = program.main(str(files / "model"), str(files / "train.parquet"))
    # of three prompts with four responses, the first has four correct ones and is dropped
    assert (result["rows"], result["kept"]) == (12, 8)
    assert result["pad_size"] == 1 and result["parts"] == [3, 3, 3]
    assert result["advantage"] > 0.5 and result["kl"] > 0 and result["balance"] <= 8 and result["width"] == 80
