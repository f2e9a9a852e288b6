"""Training runs on tasks and environments of other packages."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lockstep.trainer.main_ppo import main
from tests.trainer.test_agents import run

ENV = """
class Letters:
    def __init__(self, wanted):
        self.wanted, self.turns = wanted, 0
        if wanted == "broken":
            raise RuntimeError("no such letter")

    def reset(self):
        return "Write."

    def step(self, action):
        self.turns += 1
        return "again", sum(map(ord, action)) % 7 / 7, self.turns == 2, {}
"""


def arguments_for(tiny_run_files: Path, *more: str) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "data.train_batch_size=4",
        "data.max_prompt_length=150",
        "data.max_response_length=60",
        f"actor_rollout_ref.model.path={tiny_run_files}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.val_before_train=false",
        "trainer.logger=console",
        "trainer.device=cpu",
        *more,
    ]


def rollouts_of(folder: Path, step: int) -> list[tuple[Any, ...]]:
    lines = (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return [(row["input"], row["output"], row["score"]) for row in map(json.loads, lines)]


@pytest.mark.usefixtures("no_registrations")
def test_reasoning_gym_trains_validates_and_resumes_exactly(tiny_run_files: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (make test-environments)")
    arguments = arguments_for(
        tiny_run_files,
        "data.train_files='reasoning_gym:chain_sum?max_terms=2&max_digits=1&system_prompt=null'",
        "data.val_files='reasoning_gym:chain_sum?max_terms=2&size=4&system_prompt=null'",
        "data.max_response_length=6",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
    )
    steps, rollouts = run([*arguments, "trainer.total_training_steps=2"], tmp_path / "whole")
    assert len(steps) == 2 and "State the final answer" in rollouts[0]["input"]
    assert "val-core/reasoning_gym/chain_sum/acc/mean@1" in steps[1]
    questions = [row[0] for step in (1, 2) for row in rollouts_of(tmp_path / "whole", step)]
    assert len(set(questions)) == 8  # two samples of each, all others new
    parts = [
        *arguments,
        f"trainer.default_local_dir={tmp_path}/parts",
        f"trainer.rollout_data_dir={tmp_path}/parts/rollouts",
    ]
    assert main([*parts, "trainer.total_training_steps=1"]) == 0
    assert main([*parts, "trainer.total_training_steps=2"]) == 0
    assert rollouts_of(tmp_path / "parts", 2) == rollouts_of(tmp_path / "whole", 2)


def letters(tmp_path: Path) -> list[str]:
    loops = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/loops.yaml"
    return [f"data.train_files={tmp_path}/rows.parquet", loops]


def write_letters(tmp_path: Path, broken: Sequence[int]) -> None:
    """Rows of an environment and its entry; broken: those whose environment cannot be made."""
    (tmp_path / "letters.py").write_text(ENV)
    (tmp_path / "loops.yaml").write_text(
        f"- {{name: gym_agent, _target_: lockstep.agents.environments.GymAgent, env_class: '{tmp_path}/letters.py:Letters'}}"
    )
    rows = [
        {
            "data_source": "environment/letters",
            "prompt": [{"role": "user", "content": f"{number}:"}],
            "reward_model": {"style": "environment"},
            "agent_name": "gym_agent",
            "env_kwargs": {"wanted": "broken" if number in broken else "a"},
            "extra_info": {"index": number},
        }
        for number in range(8)
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_environment_that_always_fails_stops_the_run(
    tiny_run_files: Path, tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_letters(tmp_path, broken=range(8))
    arguments = arguments_for(tiny_run_files, *letters(tmp_path))
    assert (
        main([*arguments, f"actor_rollout_ref.rollout.mode={mode}", f"trainer.default_local_dir={tmp_path}/run"]) == 1
    )
    assert (
        "8 conversations in a row failed before the first turn of the policy; the last one: the environment of gym_agent failed: "
        "RuntimeError: no such letter" in capsys.readouterr().err
    )


@pytest.mark.usefixtures("no_registrations")
def test_gym_environments_in_training(tiny_run_files: Path, tmp_path: Path) -> None:
    write_letters(tmp_path, broken=[1])
    arguments = arguments_for(
        tiny_run_files,
        *letters(tmp_path),
        "data.shuffle=false",
        f"actor_rollout_ref.rollout.stop_token_ids={list(range(3, 200))}",  # so that turns end
    )
    steps, rollouts = run([*arguments, "trainer.save_freq=-1", "trainer.total_training_steps=2"], tmp_path / "run")
    assert [step["environment_error_counts/mean"] for step in steps] == [0.25, 0]
    assert [step["reward/reward_failed/mean"] for step in steps] == [0.25, 0]
    assert all("again" in r["output"] and "Write." in r["input"] for n, r in enumerate(rollouts) if n not in (2, 3))
    assert [step["num_turns/max"] for step in steps] == [4, 4]
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.usefixtures("no_registrations")
def test_verifiers_in_training(tiny_run_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed (make test-environments)")
    from tests.agents.environments.test_verifiers import HARNESS, TASKSET

    scored = TASKSET.replace(
        "return float(last.strip().endswith(self.data.answer))", "return sum(map(ord, last)) % 7 / 7"
    )
    (tmp_path / "scored_v1.py").write_text(scored + HARNESS.replace("temperature=0.1", "max_tokens=4"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "scored_v1", raising=False)
    arguments = arguments_for(tiny_run_files, "data.train_files='verifiers:scored-v1?count=8'")
    steps, rollouts = run([*arguments, "trainer.save_freq=-1", "trainer.total_training_steps=2"], tmp_path / "run")
    assert [step["program_error_counts/mean"] for step in steps] == [0, 0]
    assert all("Are you sure?" in rollout["output"] for rollout in rollouts if rollout["score"])
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 and step["actor/grad_norm"] > 0 for step in steps)
