"""Asynchronous training on several processes."""

import json
from pathlib import Path

import pytest

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.trainer.ppo.rollout_sources.journal import trained_groups

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from tests.shared_processes import OnSharedProcesses, SharedProcesses

pytestmark = pytest.mark.first

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        ("colocated", ["trainer.n_gpus_per_node=2"]),
        ("one_step_off", ["trainer.placement=split", "trainer.n_gpus_per_node=4"]),
        ("fully_async", ["trainer.placement=split", "trainer.n_gpus_per_node=4"]),
        pytest.param("colocated", ["trainer.n_gpus_per_node=2", TP], marks=pytest.mark.slow),
        pytest.param(
            "fully_async", ["trainer.placement=split", "trainer.n_gpus_per_node=4", TP], marks=pytest.mark.slow
        ),
    ],
)
def test_each_group_is_trained_on_once(
    overrides: list[str], tmp_path: Path, shared_processes: SharedProcesses, mode: str, workers: list[str]
) -> None:
    settings = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.async_mode={mode}",
        *workers,
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
    ]
    runner = OnSharedProcesses(shared_processes)
    assert runner.run(load_config(PPOConfig, [*overrides, *settings])) == 0
    assert not shared_processes.lent
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    stalest = max(row["async/staleness/max"] for row in steps)
    assert stalest <= 1 if mode == "colocated" else stalest == 1
    assert all("val-core/openai/gsm8k/reward/mean@1" in row for row in steps if row["step"] % 2 == 0)
    ids = [group for groups in trained_groups(tmp_path / "run").values() for group in groups]
    assert sorted(ids) == [(batch, row) for batch in range(1, 5) for row in range(4)]
