"""GRPO with rollouts in 8 bits: it learns, the drift is measured and corrected, and an audit bounds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.config.compose import log_once
from lockstep.kernels import fp8
from lockstep.models.eight_bit import Fp8Weights
from lockstep.trainer.main_ppo import main
from tests.metrics import metrics_of

GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "trainer.val_before_train=false"]
FP8 = "actor_rollout_ref.rollout.quantization=fp8"
FP8_CACHE = "actor_rollout_ref.rollout.kv_cache_dtype=fp8"
GAP = "training/rollout_log_probs_gap"


@pytest.fixture
def command(overrides: list[str], tmp_path: Path) -> list[str]:
    """Responses of odd characters are rewarded."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 2 for c in solution_str) / max(1, len(solution_str))\n"
    )
    sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.train_batch_size=8", "trainer.total_epochs=4"]
    reward = f"custom_reward_function.path={tmp_path}/reward.py"
    return [*overrides, *GRPO, *sizes, reward, "actor_rollout_ref.actor.optim.lr=3e-3", FP8]


def test_grpo_learns_and_its_drift_is_corrected(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    assert main([*command, "trainer.total_training_steps=6"]) == 0
    rows = metrics_of(tmp_path / "run")
    rewards = [row["critic/rewards/mean"] for row in rows]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.05, rewards
    gaps = [row[GAP] for row in rows]
    assert all(1e-4 < gap < 0.1 for gap in gaps), gaps  # float32 in both would differ by 1e-6
    assert all("rollout_corr/rollout_is_mean" in row for row in rows)
    assert all("timing_s/old_log_prob" in row for row in rows)  # the trainer's pass
    notice = "quantization=fp8: samples are of a policy that is not quite the trainer's, so their tokens are weighted"
    assert caplog.text.count(notice) == 1


def test_too_much_drift_stops_the_run(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = [*command, "actor_rollout_ref.rollout.quantization_max_gap=1e-4", "trainer.total_training_steps=1"]
    assert main([*strict, f"trainer.default_local_dir={tmp_path}/strict"]) == 1
    message = capfd.readouterr().err
    assert "the log-probs of the rollout in 8 bits differ from the trainer's by 0." in message
    assert "the bound is 0.0001" in message and "raise actor_rollout_ref.rollout.quantization_max_gap" in message

    refresh, served = Fp8Weights._refresh, []

    def only_once(self: Fp8Weights) -> None:
        if not served:
            refresh(self)
        served.append(self)

    monkeypatch.setattr(Fp8Weights, "_refresh", only_once)
    monkeypatch.setattr(Fp8Weights, "free", lambda self: None)
    stale = [*command, "actor_rollout_ref.actor.optim.lr=2e-2", "trainer.total_training_steps=8"]
    assert main([*stale, f"trainer.default_local_dir={tmp_path}/stale"]) == 1
    assert len(served) > 1
    assert "the log-probs of the rollout in 8 bits differ" in capfd.readouterr().err


SPLIT = ["trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2"]


def are_present(copies: Fp8Weights) -> bool:
    """Whether the copies are those of the weights that the model has now."""
    pairs = [
        (fp8.quantize(linear.weight.detach()), copy)
        for linears, own in zip(copies._products, copies._copies)
        for linear, copy in zip(linears, own)
    ]
    return all(torch.equal(a.dequantized(), b.dequantized()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_versions"),
    [
        (["actor_rollout_ref.model.lora_rank=4"], 1),  # the base is frozen
        (["actor_rollout_ref.rollout.free_cache_engine=false", FP8_CACHE], 3),
        (["trainer.async_mode=colocated"], 3),
        (["trainer.async_mode=one_step_off", *SPLIT], 2),
        (["trainer.async_mode=fully_async", *SPLIT], 3),
    ],
    ids=["lora", "kept cache", "colocated", "one step off", "fully asynchronous"],
)
def test_copies_follow_the_weights_in_every_mode(
    settings: list[str], num_versions: int, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rollout begins they are those of its weights, and so they are when it ends: weights do not change in between."""
    serving, served = Fp8Weights.serving, set()

    @contextmanager
    def watched(self: Fp8Weights) -> Iterator[None]:
        with serving(self):
            assert are_present(self)
            yield
            assert are_present(self)
            served.add(float(self._copies[0][0].dequantized().abs().sum()))

    monkeypatch.setattr(Fp8Weights, "serving", watched)
    assert main([*command, *settings, "trainer.total_training_steps=3"]) == 0
    assert len(served) >= num_versions
    assert all("rollout_corr/rollout_is_mean" in row for row in metrics_of(tmp_path / "run"))


def test_a_cache_in_8_bits_is_corrected_and_bounded(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = [*(setting for setting in command if setting != FP8), FP8_CACHE, "trainer.total_training_steps=2"]
    assert main(cache) == 0
    rows = metrics_of(tmp_path / "run")
    assert all(1e-5 < row[GAP] < 0.1 for row in rows), rows  # float32 in both would differ by 1e-6
    assert all("rollout_corr/rollout_is_mean" in row and "timing_s/old_log_prob" in row for row in rows)

    def wrong(x: Tensor) -> Tensor:
        return (300 * x.sign()).to(fp8.DTYPE)

    monkeypatch.setattr(fp8, "saturated", wrong)
    assert main([*cache, f"trainer.default_local_dir={tmp_path}/wrong"]) == 1
    assert "the log-probs of the rollout in 8 bits differ from the trainer's by" in capfd.readouterr().err
