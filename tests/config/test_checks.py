"""Checks across keys: each finds its fault, names the key and says what to set."""

import logging
from pathlib import Path

import pytest

from lockstep.config.checks import RANGES
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import keys


def test_the_minimal_configuration_passes(minimal: list[str]) -> None:
    load_config(PPOConfig, minimal)


def test_ranges_name_real_fields() -> None:
    assert set(RANGES) <= {key.field for key in keys(PPOConfig).values()}


def test_what_must_be_given() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [])
    assert [problem.key for problem in caught.value.problems] == ["data.train_files", "actor_rollout_ref.model.path"]


ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_files=nowhere.parquet"], "data.train_files=nowhere.parquet: no such file"),
        (["data.val_files=nowhere.parquet"], "data.val_files=nowhere.parquet: no such file"),
        (["actor_rollout_ref.model.path=org/name"], "model.path=org/name: no such folder; a model of the hub"),
        (["data.train_batch_size=128"], f"{ACTOR}.ppo_mini_batch_size=256: is more than data.train_batch_size=128"),
        (["data.train_batch_size=300"], f"{ACTOR}.ppo_mini_batch_size=256: does not divide data.train_batch_size=300"),
        (["critic.ppo_mini_batch_size=300"], "critic.ppo_mini_batch_size=300: does not divide"),
        ([f"{ACTOR}.ppo_epochs=0"], f"{ACTOR}.ppo_epochs=0: must be greater than 0"),
        ([f"{ACTOR}.clip_ratio=-0.1"], f"{ACTOR}.clip_ratio=-0.1: must be 0 or more"),
        ([f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p=0.0: must be greater than 0 and at most 1"),
        ([f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k=0: must be 1 or more, or -1 for all"),
        ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature=0: nothing can be sampled at temperature 0"),
        ([f"{ROLLOUT}.val_kwargs.do_sample=true"], f"{ROLLOUT}.val_kwargs.temperature=0: nothing can be sampled"),
        ([f"{ROLLOUT}.max_model_len=100"], f"{ROLLOUT}.max_model_len=100: prompt_length + response_length is 1024"),
        ([f"{ROLLOUT}.prompt_length=100"], f"{ROLLOUT}.prompt_length=100: is less than data.max_prompt_length=512"),
        (["trainer.save_freq=0"], "trainer.save_freq=0: must be 1 or more, or -1 for never"),
        (["trainer.total_training_steps=0"], "trainer.total_training_steps=0: must be 1 or more, or null"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path: must be the global_step_N folder"),
        (["trainer.nnodes=2"], "trainer.nnodes=2: this build trains with one worker; set 1"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=4"], "this build keeps each sequence on one worker; set 1"),
        (["actor_rollout_ref.hybrid_engine=false"], "hybrid_engine=false: actor and rollout share one worker"),
        (["reward_model.enable=true"], "reward_model.model.path: must be the folder of the reward model"),
        (["custom_reward_function.path=nowhere.py"], "custom_reward_function.path=nowhere.py: no such file"),
        (["data.custom_cls.path=pkg://m"], "data.custom_cls.name: must name the class"),
        ([f"{ACTOR}.checkpoint.save_contents=[model,optim]"], "[optim] is not among model, optimizer"),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1000"],
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000: one sequence may have 1024 tokens",
        ),
    ],
)
def test_a_fault_is_one_problem(minimal: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *overrides])
    assert len(caught.value.problems) == 1, caught.value
    assert message in str(caught.value)


def test_a_folder_that_holds_no_model(minimal: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(PPOConfig, [*minimal, f"actor_rollout_ref.model.path={tmp_path}"])


def test_a_critic_that_is_not_trained_is_not_checked(minimal: list[str]) -> None:
    load_config(PPOConfig, [*minimal, "algorithm=grpo", "critic.model.path=nowhere", "critic.ppo_mini_batch_size=7"])


def test_no_check_speaks_of_a_key_that_is_mistyped_already(minimal: list[str]) -> None:
    overrides = [*minimal, "data.train_batch_size=many", f"{ACTOR}.ppo_mini_batch_size=1000"]
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, overrides)
    assert [problem.key for problem in caught.value.problems] == ["data.train_batch_size"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ACTOR}.clip_ratio_low=0.8"], "clip_ratio_low=0.8 is a distance: the ratio is clipped at 1-0.8=0.2"),
        (["algorithm.adv_estimator=grpo"], f"{ROLLOUT}.n=1: grpo compares the samples of one prompt"),
        ([f"{ROLLOUT}.n=4", f"{ROLLOUT}.do_sample=false"], "the 4 samples of a prompt will be the same"),
        ([f"{ROLLOUT}.response_length=64"], "response_length=64 differs from data.max_response_length=512"),
        (["trainer.resume_from_path=x"], "counts only with trainer.resume_mode=resume_path, and that is auto"),
        (["trainer.test_freq=5"], "trainer.test_freq=5 without data.val_files"),
    ],
)
def test_what_is_likely_not_meant_is_a_warning(
    minimal: list[str], overrides: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, [*minimal, *overrides])
    assert message in caplog.text
