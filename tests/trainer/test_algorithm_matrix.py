"""Every advantage estimator and every policy loss trains two steps with the real trainer."""

import json
import signal
from pathlib import Path

import pytest

from lockstep.algorithms.advantages import ADVANTAGE_ESTIMATORS
from lockstep.algorithms.losses.policy import POLICY_LOSSES
from lockstep.observability.glossary import explain
from lockstep.trainer.main_ppo import main
from tests.programs import Program

pytestmark = pytest.mark.first

SETTINGS = {
    "gdpo": ["algorithm.gdpo_reward_keys=[acc,length]"],
    "gae": ["algorithm.use_kl_in_reward=true"],
    "bypass_mode": ["algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token"],
}
CASES = [(name, "vanilla") for name in ADVANTAGE_ESTIMATORS] + [
    ("grpo", name) for name in POLICY_LOSSES if name != "vanilla"
]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    score = sum(ord(c) % 7 for c in solution_str) % 11 / 10\n"
        "    return {'score': score, 'acc': float(score > 0.5), 'length': float(len(solution_str) % 3)}\n"
    )
    return path


def run(overrides: list[str], tmp_path: Path, *extra: str) -> list[dict[str, float]]:
    command = [*overrides, "trainer.total_training_steps=2", "trainer.val_before_train=false", *extra]
    command += ["trainer.save_freq=0", "reward_model.timeout_s=null"]
    assert main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step", "time", "non_finite"}
    assert [name for name in names if explain(name) is None] == [], "add them to lockstep/observability/glossary.py"
    return rows


@pytest.mark.parametrize(("estimator", "loss"), CASES)
def test_two_steps_are_finite_and_update_the_policy(
    overrides: list[str], tmp_path: Path, reward: Path, estimator: str, loss: str
) -> None:
    rows = run(
        overrides,
        tmp_path,
        f"custom_reward_function.path={reward}",
        f"algorithm.adv_estimator={estimator}",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        *SETTINGS.get(estimator, []),
        *SETTINGS.get(loss, []),
    )
    assert [r["step"] for r in rows] == [1, 2]
    assert all("non_finite" not in r for r in rows)
    assert all(r["actor/grad_norm"] > 0 for r in rows)


def test_rollout_correction_and_particle_filter(overrides: list[str], tmp_path: Path) -> None:
    rows = run(
        overrides,
        tmp_path,
        "algorithm.adv_estimator=rloo",
        "actor_rollout_ref.rollout.n=3",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
        "algorithm.use_pf_ppo=true",
    )
    assert rows[0]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert rows[0]["actor/grad_norm"] > 0


def test_group_filter_samples_until_the_batch_is_full(overrides: list[str], tmp_path: Path, reward: Path) -> None:
    rows = run(
        overrides,
        tmp_path,
        f"custom_reward_function.path={reward}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
    )
    assert rows[0]["train/num_gen_batches"] >= 1
    dumped = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(dumped) == 8
    for first, second in zip(dumped[::2], dumped[1::2]):
        assert first["acc"] != second["acc"]


def test_group_filter_stops_at_its_limit(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "constant.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    command = [*overrides, f"custom_reward_function.path={tmp_path}/constant.py", "algorithm.adv_estimator=grpo"]
    command += ["actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"]
    limit = "algorithm.filter_groups.max_num_gen_batches=2"
    assert main([*command, "algorithm.filter_groups.enable=true", limit]) == 1
    err = capsys.readouterr().err
    assert limit in err and "0 of 4 prompts" in err


def test_group_filter_can_be_interrupted(overrides: list[str], tmp_path: Path) -> None:
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    (tmp_path / "constant.py").write_text(signature + "    return 1.0\n")
    command = [*overrides, f"custom_reward_function.path={tmp_path}/constant.py", "algorithm.adv_estimator=grpo"]
    command += [
        "actor_rollout_ref.rollout.n=2",
        "algorithm.filter_groups.enable=true",
        "trainer.val_before_train=false",
    ]
    program = Program("lockstep.trainer.main_ppo", command, tmp_path)
    assert program.until(lambda: "8 batches sampled" in program.stderr), program.stderr
    program.signal(signal.SIGTERM)
    assert program.wait() == 130
    assert "stopped by the user after step 0" in program.stderr and "Traceback" not in program.stderr


def test_estimator_without_its_inputs_is_refused_at_the_start(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    assert main([*overrides, "algorithm.adv_estimator=egpo", "actor_rollout_ref.rollout.n=2", bypass]) == 2
    assert "entropys" in capsys.readouterr().err


def test_missing_reward_columns_and_failed_rows_do_not_stop_the_run(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "partial.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    total = sum(ord(c) % 7 for c in solution_str)\n"
        "    if total % 5 == 0:\n"
        "        raise ValueError('cannot parse')\n"
        "    extra = {'pred': str(total)} if total % 2 else {}\n"
        "    return {'score': total % 11 / 10, 'acc': float(total % 3 == 0), **extra}\n"
    )
    rows = run(
        overrides,
        tmp_path,
        f"custom_reward_function.path={tmp_path}/partial.py",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "data.gen_batch_size=2",
        "trainer.test_freq=1",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    )
    assert rows[0]["train/num_gen_batches"] >= 2
    assert 0 <= rows[0]["val-core/openai/gsm8k/acc/mean@4"] <= 1
    assert 0 < rows[0]["reward/reward_failed/mean"] < 1


def test_a_short_validation_batch_that_fails_does_not_stop_the_run(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "partial.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if extra_info['index'] == 3:\n"
        "        raise ValueError('cannot parse')\n"
        "    return {'score': 1.0, 'acc': 1.0}\n"
    )
    dump = f"trainer.validation_data_dir={tmp_path}/answers"
    validation = [f"custom_reward_function.path={tmp_path}/partial.py", "trainer.val_only=true", dump]
    (row,) = run(overrides, tmp_path, *validation, "data.val_batch_size=3")
    assert row["val-core/openai/gsm8k/acc/mean@1"] == 0.75
    assert row["val-aux/openai/gsm8k/reward_failed/mean@1"] == 0.25
    assert [json.loads(line)["acc"] for line in (tmp_path / "answers" / "0.jsonl").read_text().splitlines()] == [
        1,
        1,
        1,
        0,
    ]
    assert main([*overrides, *validation, "data.val_batch_size=1"]) == 1  # a whole batch fails


def test_rejected_tokens_do_not_lose_the_reward(overrides: list[str], tmp_path: Path) -> None:
    """The threshold is within log-prob rounding, so many sequences have rejected tokens; returns must still equal the rewards."""
    rows = run(
        overrides,
        tmp_path,
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.9999999_1.0",
        "actor_rollout_ref.rollout.name=hf",  # the embedded engine may agree with the trainer to the bit
    )
    assert rows[0]["rollout_corr/rollout_rs_masked_fraction"] > 0.05
    assert rows[0]["critic/returns/max"] == pytest.approx(rows[0]["critic/score/max"])
