"""GRPO of a tiny mixture of experts, with the experts of the rollout or of the old-log-prob pass replayed."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.trainer.main_ppo import main
from tests.tiny import save_tiny_moe

REPLAY = "actor_rollout_ref.actor.router_replay.mode"
RECORD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
GRPO = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=3",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
]


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture
def run(overrides: list[str], tmp_path: Path, moe: Path) -> Any:
    def start(*extra: str, name: str = "run", status: int = 0) -> list[dict[str, float]]:
        folder = tmp_path / name
        model = f"actor_rollout_ref.model.path={moe}"
        assert main([*overrides, *GRPO, model, *extra, f"trainer.default_local_dir={folder}"]) == status
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return start


def test_r3_replays_the_rollouts_experts(run: Any) -> None:
    for step in run(f"{REPLAY}=R3"):
        assert step["training/rollout_log_probs_gap"] < 1e-5
        assert step["training/route_mismatch"] == 0
        assert 0 <= step["actor/route_mismatch"] < 1
        assert step["actor/grad_norm"] > 0
