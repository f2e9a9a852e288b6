"""A small model learns to call a calculator: with agent workers on Ray, and by an outside program that speaks HTTP."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.demo.main_demo import _prepare, training_overrides, warm_model
from lockstep.demo.tasks import TOOLS
from lockstep.trainer.main_ppo import main

pytestmark = [pytest.mark.first, pytest.mark.slow]

RECIPE = replace(TOOLS.recipe, steps=300)
PROGRAM = Path(__file__).parents[2] / "examples" / "calculator_agent.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's problems, and a model that knows the format of a call and prefers to guess."""
    folder = tmp_path_factory.mktemp("calculator")
    assert _prepare(Console(quiet=True), folder, TOOLS, RECIPE, 0, "cpu") == 0
    return folder


def overrides(files: Path, out: Path, prompts: int, steps: int) -> list[str]:
    return [
        *training_overrides(files, warm_model(files, RECIPE), out, "grpo", steps, 0, "cpu", TOOLS),
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "data.val_max_samples=64",
        f"trainer.test_freq={steps}",
        "trainer.save_freq=0",
        "trainer.logger=[]",
    ]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_with_two_agent_workers_on_ray(files: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')
    from tests.shared_processes import OnSharedProcesses

    settings = ["trainer.controller=ray", "actor_rollout_ref.rollout.agent.num_workers=2"]
    config = load_config(PPOConfig, [*overrides(files, tmp_path / "run", 32, 8), *settings])
    assert OnSharedProcesses(request.getfixturevalue("shared_processes")).run(config) == 0
    accuracy = "val-core/products/acc/mean@1"
    first, last = (step[accuracy] for step in metrics(tmp_path / "run") if accuracy in step)
    assert first < 0.2 and last > 0.8


def test_one_step_by_a_program_that_knows_only_an_address(files: Path, tmp_path: Path) -> None:
    """docs/agents.md has the results of a whole run, which starts 1,664 programs."""
    loops = tmp_path / "loops.yaml"
    command = json.dumps([sys.executable, "-I", "-S", str(PROGRAM)])
    loops.write_text(
        f"- name: tool_agent\n  _target_: lockstep.agents.loops.ProgramAgent\n  command: {command}\n  max_concurrent: 4\n"
    )
    settings = [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    assert main([*overrides(files, tmp_path / "run", 8, 1), *settings]) == 0
    (step,) = metrics(tmp_path / "run")
    # About one of five samples calls the calculator, whose result the model copies; then it is right.
    assert 0 < step["critic/score/mean"] < 0.6 and step["reward/tool/mean"] == pytest.approx(
        step["critic/score/mean"], abs=0.2
    )
    assert step["program_error_counts/max"] == step["trajectory_breaks/max"] == 0
    assert step["num_turns/max"] == 4 and step["training/rollout_probs_diff_max"] < 1e-4
