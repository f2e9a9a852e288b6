"""Sources of old log-probs: skipping the pass changes no number, and the audit still works."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.protocol import DataProto
from lockstep.trainer.main_ppo import main
from lockstep.workers import rollout_batch

pytestmark = pytest.mark.first

STEPS = ["trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.save_freq=0"]
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.optim.lr=1e-3"]
GRPO += ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4"]
BYPASS = "algorithm.rollout_correction.bypass_mode=true"


def untimed(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(("time", "timing", "perf/"))}


@pytest.fixture
def run(overrides: list[str], tmp_path: Path, random_reward: list[str]) -> Any:
    def start(*extra: str, name: str = "run") -> list[dict[str, float]]:
        folder = tmp_path / name
        command = [*overrides, *random_reward, *STEPS, *GRPO, *extra, f"trainer.default_local_dir={folder}"]
        assert main(command) == 0
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return start


@pytest.fixture
def random_reward(tmp_path: Path) -> list[str]:
    path = tmp_path / "reward.py"
    path.write_text(
        "import zlib\n\n\ndef compute_score(data_source, solution_str, **_):\n"
        "    return zlib.crc32(solution_str.encode()) % 7 / 7\n"
    )
    return [f"custom_reward_function.path={path}"]


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.01"],
        ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
    ],
    ids=["grpo", "kl-and-entropy", "gae-gspo"],
)
def test_single_update_skips_the_pass(run: Any, extra: list[str]) -> None:
    own = run(*extra, name="own")
    passed = run(*extra, "actor_rollout_ref.actor.old_log_prob_pass=always", name="passed")
    assert all("timing_s/old_log_prob" not in row for row in own)
    assert all(row["timing_s/old_log_prob"] > 0 for row in passed)
    for a, b in zip(own, passed, strict=True):
        assert untimed(a) == pytest.approx(untimed(b), abs=2e-5)
    assert any(row["actor/grad_norm"] > 0 for row in own)


@pytest.mark.parametrize(
    "extra",
    [
        ["actor_rollout_ref.actor.ppo_mini_batch_size=2"],
        ["actor_rollout_ref.actor.ppo_epochs=2"],
        ["algorithm.use_kl_in_reward=true"],
        ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0"],
        ["actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"],
        ["algorithm.adv_estimator=optimal_token_baseline"],
        ["algorithm.use_pf_ppo=true"],
    ],
    ids=["mini-batches", "epochs", "kl-in-reward", "correction", "prepared-loss", "estimator", "pf-ppo"],
)
def test_pass_is_kept_if_something_reads_them_before_the_update(run: Any, extra: list[str]) -> None:
    assert all("timing_s/old_log_prob" in row for row in run(*extra))


def wrongly_scored(*args: Any) -> DataProto:
    """A batch of rollouts with wrong log-probs."""
    batch = rollout_batch.batch_of(*args)
    batch.tensors["rollout_log_probs"] -= 1.0
    return batch


@pytest.mark.parametrize("extra", [[], [BYPASS], [BYPASS, "actor_rollout_ref.actor.ppo_mini_batch_size=2"]])
def test_wrong_rollout_log_probs_stop_the_run_before_an_update(
    run: Any, extra: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(*extra, name="right")
    assert all(row["training/rollout_log_probs_gap"] < 1e-5 for row in rows)
    monkeypatch.setattr("lockstep.workers.actor_rollout_ref.batch_of", wrongly_scored)
    moved: list[float] = []
    monkeypatch.setattr("lockstep.engines.train.fsdp.FsdpEngine.optimizer_step", lambda self: moved.append(1.0))
    with pytest.raises(AssertionError):
        run(*extra, name="wrong")
    assert "differ from the trainer's by 1.0" in capsys.readouterr().err and not moved


def test_corrected_gap_is_reported_only(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.workers.actor_rollout_ref.batch_of", wrongly_scored)
    rows = run(BYPASS, "algorithm.rollout_correction.rollout_is=token")
    assert all(row["training/rollout_log_probs_gap"] == pytest.approx(1.0, abs=0.01) for row in rows)
