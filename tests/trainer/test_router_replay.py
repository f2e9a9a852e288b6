"""GRPO of a tiny mixture of experts, with the experts of the rollout or of the old-log-prob pass replayed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engines.rollout.embedded import model_runner
from lockstep.models.router_replay import Routing
from lockstep.trainer.main_ppo import main
from tests.tiny import save_tiny_moe

pytestmark = pytest.mark.first

MODE = "actor_rollout_ref.actor.router_replay.mode"
RECORD = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
PASS = "actor_rollout_ref.actor.old_log_prob_pass=always"
GRPO = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=3",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture
def run(overrides: list[str], tmp_path: Path, moe: Path) -> Run:
    def start(*extra: str, name: str = "run", status: int = 0) -> list[dict[str, Any]]:
        folder = tmp_path / name
        model = f"actor_rollout_ref.model.path={moe}"
        assert main([*overrides, *GRPO, model, *extra, f"trainer.default_local_dir={folder}"]) == status
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return start


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(("time", "timing", "perf/"))}


@pytest.fixture
def rerouted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout sends every third token to other experts than its routers choose, as a router with other rounding might."""

    class Rerouting(Routing):
        def choose(self, index: int, own: torch.Tensor) -> torch.Tensor:
            chosen = own.clone()
            chosen[own.sum(1) % 3 == 0] = (own[own.sum(1) % 3 == 0] + 1) % self.num_experts
            return super().choose(index, chosen)

    monkeypatch.setattr(model_runner, "Routing", Rerouting)
    monkeypatch.setattr("lockstep.engines.rollout.embedded.engine.EmbeddedEngine._check_model", lambda self: None)


REPORTED = ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=1e9"]
"""Large gaps are reported, not refused."""


@pytest.mark.parametrize(
    "extra",
    [pytest.param([PASS], marks=pytest.mark.slow), ["actor_rollout_ref.actor.ppo_mini_batch_size=4"]],
    ids=["pass", "update"],
)
def test_r3_closes_the_gap_that_other_experts_leave(run: Run, rerouted: None, extra: list[str]) -> None:
    for step in run(*extra, *(REPORTED if PASS in extra else []), f"{MODE}=R3", name="replayed"):
        assert step["training/rollout_log_probs_gap"] < 1e-5
        assert 0.1 < step["training/route_mismatch"] < 0.9
        assert step["actor/grad_norm"] > 0
    first = run(*extra, *REPORTED, f"{RECORD}=true", name="free")[0]
    assert first["training/rollout_log_probs_gap"] > 0.05
    assert 0.1 < first["training/route_mismatch"] < 0.9


@pytest.mark.slow
def test_recording_alone_changes_nothing(run: Run) -> None:
    plain = run(name="plain")
    recorded = run(f"{RECORD}=true", name="recorded")
    for before, after in zip(plain, recorded, strict=True):
        assert after.pop("training/route_mismatch") == 0
        assert untimed(before) == untimed(after)


def test_r2_replays_the_experts_of_the_old_policy(run: Run) -> None:
    """Updates after the first use routes of an earlier policy; at a high rate their routers would choose others."""
    fast = ["actor_rollout_ref.actor.optim.lr=0.05", "actor_rollout_ref.actor.ppo_epochs=3"]
    steps = run(f"{MODE}=R2", *fast)
    assert all(step["actor/route_mismatch"] > 0.01 for step in steps)
    assert all("training/route_mismatch" not in step for step in steps)


@pytest.mark.slow
def test_r2_without_a_second_update_is_the_plain_run(run: Run) -> None:
    one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    plain = run(one_update, PASS, name="plain")
    replayed = run(one_update, PASS, f"{MODE}=R2", name="replayed")
    for before, after in zip(plain, replayed, strict=True):
        assert after.pop("actor/route_mismatch") == 0
        assert untimed(before) == untimed(after)
    assert [untimed(row) for row in run(one_update, f"{MODE}=R2", name="no_pass")] == [
        untimed(row) for row in run(one_update, name="no_pass_plain")
    ]


def test_the_load_is_balanced(run: Run) -> None:
    steps = ["trainer.total_training_steps=6", "trainer.total_epochs=4", "actor_rollout_ref.actor.optim.lr=3e-3"]
    balanced = run("actor_rollout_ref.actor.router_aux_loss_coef=1.0", *steps)
    assert balanced[-1]["actor/router_aux_loss"] < balanced[0]["actor/router_aux_loss"]
    assert all(1 <= step["actor/expert_load_max"] <= 4 for step in balanced)


@pytest.mark.slow
def test_the_result_does_not_depend_on_micro_batches_or_workers(run: Run) -> None:
    keys = [f"{MODE}=R3", "actor_rollout_ref.actor.router_aux_loss_coef=0.5"]
    whole = run(*keys, name="whole")
    small = run(*keys, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", name="small")
    two = run(*keys, "trainer.n_gpus_per_node=2", name="two")
    for a, b, c in zip(whole, small, two, strict=True):
        assert untimed(a) == pytest.approx(untimed(b), abs=2e-5)
        names = [name for name in untimed(a) if name.startswith(("actor/", "critic/", "training/ro"))]
        assert {n: a[n] for n in names} == pytest.approx({n: c[n] for n in names}, abs=2e-5)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(run: Run) -> None:
    keys = [f"{MODE}=R3", "actor_rollout_ref.actor.router_aux_loss_coef=0.1", "trainer.total_epochs=4"]
    whole = run(*keys, "trainer.total_training_steps=4", name="whole")
    run(*keys, "trainer.total_training_steps=2", "trainer.save_freq=2", name="resumed")
    resumed = run(*keys, "trainer.total_training_steps=4", name="resumed")
    assert [untimed(row) for row in resumed[-2:]] == [untimed(row) for row in whole[-2:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        ["actor_rollout_ref.rollout.mode=async"],
        ["trainer.async_mode=colocated", "algorithm.rollout_correction.rollout_is=null"],
        ["algorithm.adv_estimator=gae", "critic.model.path={moe}"],
        [
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
        ],
        ["actor_rollout_ref.actor.strategy=deepspeed"],
    ],
    ids=["requests", "asynchronous", "ppo", "lora", "deepspeed"],
)
def test_r3_with_other_parts(run: Run, moe: Path, extra: list[str]) -> None:
    if "deepspeed" in extra[0]:
        pytest.importorskip("deepspeed")
    for step in run(f"{MODE}=R3", *(key.format(moe=moe) for key in extra)):
        assert step["actor/route_mismatch"] < 1
        if "async_mode" not in extra[0]:
            assert step["training/rollout_log_probs_gap"] < 1e-5
            assert step["training/route_mismatch"] == 0


def test_a_model_without_experts_is_refused(overrides: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*overrides, *GRPO, f"{MODE}=R2"]) != 0
    assert "router_replay.mode: Qwen2ForCausalLM has no experts" in capfd.readouterr().err
