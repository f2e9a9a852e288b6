"""Tokens per micro-batch that are chosen from the device's memory."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig
from lockstep.config.sft import SFTConfig
from lockstep.plan.estimate import plan_of
from lockstep.plan.hardware import DEVICES, Device, known_gpu
from lockstep.plan.token_budgets import BUDGETS, WITHOUT_A_PLAN, describe_budgets, with_token_budgets
from lockstep.trainer.run import memory_check
from lockstep.trainer.run.memory_check import with_chosen_sizes
from tests.plan.test_plan import write_model

ACTOR = "actor_rollout_ref.actor"
CPU = Device("cpu", 64e9, 1e12, 1e11)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    (tmp_path / "train.parquet").touch()

    def config(shape: str, *overrides: str) -> PPOConfig:
        model = write_model(tmp_path / shape, shape)
        given = [f"data.train_files={tmp_path}/train.parquet", f"actor_rollout_ref.model.path={model}"]
        return load_config(PPOConfig, ["algorithm=grpo", *given, *overrides])

    return config


def tokens(config: PPOConfig) -> int:
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is True
    return config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu


@pytest.mark.parametrize(
    ("shape", "device"), [("0.5b", "RTX4090"), ("0.5b", "H100"), ("1.5b", "H100"), ("1.5b", "H200")]
)
def test_a_run_without_sizes_fits(load: Any, shape: str, device: str) -> None:
    plan = plan_of(with_token_budgets(load(shape), DEVICES[device]), DEVICES[device])
    assert plan.needed <= 0.9 * DEVICES[device].memory


def test_more_memory_gives_more_tokens(load: Any) -> None:
    sizes = [tokens(with_token_budgets(load("1.5b"), replace(DEVICES["H100"], memory=m * 1e9))) for m in (40, 85, 150)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] and set(sizes) <= set(BUDGETS)
    nothing_fits = with_token_budgets(load("7b"), DEVICES["RTX4090"])
    assert tokens(nothing_fits) == 1024  # a sequence of the longest prompt and response


def test_every_role_and_explicit_settings(load: Any) -> None:
    more = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "critic.ppo_max_token_len_per_gpu=2048"]
    config = load("0.5b", "algorithm.adv_estimator=gae", *more)
    found = with_token_budgets(config, DEVICES["H100"])
    policy = found.actor_rollout_ref
    assert policy.actor.use_dynamic_bsz is False and policy.actor.ppo_micro_batch_size_per_gpu == 4
    assert found.critic.use_dynamic_bsz and found.critic.ppo_max_token_len_per_gpu == 2048
    assert policy.rollout.log_prob_use_dynamic_bsz and policy.ref.log_prob_use_dynamic_bsz
    assert policy.rollout.log_prob_max_token_len_per_gpu in BUDGETS
    whole = load("0.5b", f"{ACTOR}.use_dynamic_bsz=false")
    assert with_token_budgets(whole, DEVICES["H100"]) is whole
    twice = with_token_budgets(found, DEVICES["RTX4090"])
    assert twice is found


def test_rows_of_the_critic_s_values_keep_its_update_small(load: Any) -> None:
    config = load("0.5b", "algorithm.adv_estimator=gae", "critic.forward_micro_batch_size_per_gpu=8")
    found = with_token_budgets(config, DEVICES["H100"]).critic
    assert found.use_dynamic_bsz is False and found.forward_micro_batch_size_per_gpu == 8
    assert 1 <= (found.ppo_micro_batch_size_per_gpu or 0) <= max(BUDGETS) // 1024


@pytest.mark.parametrize("given", [4096, 32768])
def test_tokens_of_the_critic_s_values_stay_and_those_of_its_update_fit(load: Any, given: int) -> None:
    set_by_user = ["algorithm.adv_estimator=gae", f"critic.forward_max_token_len_per_gpu={given}"]
    config, device = load("1.5b", *set_by_user), replace(DEVICES["H100"], memory=60e9)
    chosen = with_token_budgets(config, device)
    assert chosen.critic.use_dynamic_bsz is True and chosen.critic.forward_max_token_len_per_gpu == given
    assert chosen.critic.ppo_max_token_len_per_gpu < 32768
    free = with_token_budgets(load("1.5b", "algorithm.adv_estimator=gae"), device)
    assert chosen.critic.ppo_max_token_len_per_gpu == free.critic.ppo_max_token_len_per_gpu
    assert "critic.ppo_max_token_len_per_gpu=" in (describe_budgets(config, chosen, device) or "")
    assert with_token_budgets(chosen, DEVICES["RTX4090"]) is chosen
    explicit = with_token_budgets(load("1.5b", *set_by_user, "critic.use_dynamic_bsz=true"), device)
    assert explicit.critic.ppo_max_token_len_per_gpu == 32768  # the default of verl


def test_processes_on_cpu_share_the_machine(load: Any) -> None:
    one, eight = (
        with_token_budgets(load("0.5b", f"trainer.n_gpus_per_node={n}", "trainer.device=cpu"), CPU) for n in (1, 8)
    )
    assert 1024 <= tokens(eight) < tokens(one) <= max(BUDGETS)


def test_sequences_are_never_longer_than_a_micro_batch(load: Any, tmp_path: Path) -> None:
    long = load("0.5b", "data.max_prompt_length=20000", "data.max_response_length=20000", "trainer.n_gpus_per_node=4")
    assert tokens(with_token_budgets(long, DEVICES["RTX4090"])) == 40000
    split = [f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    long = load(
        "0.5b", "data.max_prompt_length=20000", "data.max_response_length=20000", "trainer.n_gpus_per_node=4", *split
    )
    assert tokens(with_token_budgets(long, DEVICES["RTX4090"])) in (20000, 32768)
    model = write_model(tmp_path / "0.5b", "0.5b")
    pairs = load_config(DPOConfig, [f"model.path={model}", "data.max_length=30000"], run_checks=False)
    assert with_token_budgets(pairs, DEVICES["H100"]).data.max_token_len_per_gpu == 60000


def test_supervised_training(tmp_path: Path) -> None:
    model = write_model(tmp_path / "1.5b", "1.5b")

    def load(*overrides: str) -> SFTConfig:
        return load_config(SFTConfig, [f"model.path={model}", *overrides], run_checks=False)

    keeps_all = load("model.enable_gradient_checkpointing=false")
    small, large = (with_token_budgets(keeps_all, DEVICES[name]).data for name in ("A100-40G", "H200"))
    assert small.use_dynamic_bsz and large.use_dynamic_bsz and small.max_token_len_per_gpu < large.max_token_len_per_gpu
    assert (
        with_token_budgets(load("data.max_token_len_per_gpu=4096"), DEVICES["H200"]).data.max_token_len_per_gpu == 4096
    )
    assert with_token_budgets(load("data.use_dynamic_bsz=true"), DEVICES["H200"]).data.max_token_len_per_gpu == 8192
    by_rows = with_token_budgets(load("data.micro_batch_size_per_gpu=2"), DEVICES["H200"]).data
    assert by_rows.use_dynamic_bsz is False and by_rows.micro_batch_size_per_gpu == 2


def test_unknown_models_and_gpus(load: Any, tmp_path: Path) -> None:
    config = load("0.5b")
    assert tokens(with_token_budgets(config, known_gpu("NVIDIA Quantum 9000", 85e9))) == tokens(
        with_token_budgets(config, replace(DEVICES["A100-80G"], memory=85e9))
    )
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "odd"}')
    policy = replace(
        config.actor_rollout_ref, model=replace(config.actor_rollout_ref.model, path=str(tmp_path / "odd"))
    )
    assert tokens(with_token_budgets(replace(config, actor_rollout_ref=policy), DEVICES["H100"])) == WITHOUT_A_PLAN


def test_plan_and_trainer_choose_the_same(
    load: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory_check, "this_gpu", lambda: DEVICES["H100"])
    chosen = with_chosen_sizes(load("1.5b"), "cuda")
    assert main(["plan", "--device", "H100", "algorithm=grpo", f"actor_rollout_ref.model.path={tmp_path}/1.5b"]) == 0
    line = "tokens per micro-batch chosen for 85 GB (H100): "
    shown = capsys.readouterr().out
    assert line in shown and f"{ACTOR}.ppo_max_token_len_per_gpu={tokens(chosen)}" in shown
    assert f"{ACTOR}.ppo_max_token_len_per_gpu={tokens(chosen)}" in caplog.messages[-1] and line in caplog.messages[-1]
    assert "critic." not in caplog.messages[-1]  # there is none
    caplog.clear()
    assert with_chosen_sizes(chosen, "cuda") is chosen and not caplog.records
