"""Sizes that the user has not set: how micro-batches are filled, mini-batches, and batches of a small dataset."""

import logging
from pathlib import Path
from typing import Any

import pytest

from lockstep.algorithms.advantages import ADVANTAGE_ESTIMATORS
from lockstep.algorithms.advantages.registry import parameters_of
from lockstep.algorithms.losses.policy import preparation_of
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.config.batch_sizes import fitted_to_rows
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.estimators import may_read
from lockstep.config.plugin_settings import is_prepared
from lockstep.config.policy_loss import BUILT_IN_LOSSES
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SFTConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


def switches(*overrides: str) -> list[bool | None]:
    """How the actor, the old log-probs, the reference, the critic and the reward model fill their micro-batches."""
    config = load_config(PPOConfig, overrides, run_checks=False)
    policy = config.actor_rollout_ref
    return [
        policy.actor.use_dynamic_bsz,
        policy.rollout.log_prob_use_dynamic_bsz,
        policy.ref.log_prob_use_dynamic_bsz,
        config.critic.use_dynamic_bsz,
        config.reward_model.use_dynamic_bsz,
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [None] * 5),
        ([f"{ACTOR}.use_dynamic_bsz=true"], [True] * 5),  # as in verl
        ([f"{ACTOR}.use_dynamic_bsz=false"], [False] * 5),
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], [None] * 5),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=4096"], [True, True, True, None, None]),
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=4096", f"{REF}.log_prob_micro_batch_size_per_gpu=2"],
            [True, True, None, None, None],
        ),
        (["critic.ppo_max_token_len_per_gpu=4096"], [None, None, None, True, True]),
        (
            ["critic.ppo_max_token_len_per_gpu=4096", "reward_model.micro_batch_size_per_gpu=2"],
            [None, None, None, True, None],
        ),
        ([f"{ROLLOUT}.log_prob_max_token_len_per_gpu=4096"], [None, True, None, None, None]),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=4096", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], [None] * 5),
    ],
)
def test_what_fills_a_micro_batch(overrides: list[str], expected: list[bool | None]) -> None:
    assert switches(*overrides) == expected


def test_tokens_of_explicit_settings_are_those_of_verl() -> None:
    config = load_config(PPOConfig, [f"{ACTOR}.use_dynamic_bsz=true"], run_checks=False)
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16384
    assert config.critic.ppo_max_token_len_per_gpu == 32768


@pytest.fixture
def minimal(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "train.parquet").touch()
    return [f"data.train_files={tmp_path}/train.parquet", f"actor_rollout_ref.model.path={tmp_path}"]


def test_mini_batch_of_a_small_batch(minimal: list[str]) -> None:
    config = load_config(PPOConfig, [*minimal, "data.train_batch_size=48"])
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 48
    with pytest.raises(ConfigError, match=r"is larger than data\.train_batch_size=48"):
        load_config(PPOConfig, [*minimal, "data.train_batch_size=48", f"{ACTOR}.ppo_mini_batch_size=64"])


@pytest.mark.parametrize(
    ("overrides", "num_rows", "sizes"),
    [
        ([], 5000, (1024, 256)),
        ([], 1000, (768, 256)),
        ([], 100, (100, 100)),
        ([f"{ACTOR}.ppo_mini_batch_size=32"], 100, (96, 32)),
        ([f"{ACTOR}.ppo_mini_batch_size=128"], 100, (1024, 128)),  # the loader refuses it
        ([f"{ROLLOUT}.over_sample_rate=0.2", f"{ROLLOUT}.mode=async"], 100, (80, 80)),
        (["data.train_batch_size=1024"], 100, (1024, 256)),  # set by the user
        (["data.train_batch_size=128"], 100, (128, 128)),
    ],
)
def test_batch_of_a_small_dataset(
    overrides: list[str],
    num_rows: int,
    sizes: tuple[int, int],
    minimal: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = load_config(PPOConfig, [*minimal, *overrides])
    caplog.clear()
    fitted = fitted_to_rows(config, num_rows)
    mini = fitted.actor_rollout_ref.actor.ppo_mini_batch_size
    assert (fitted.data.train_batch_size, mini) == sizes
    assert fitted.critic.ppo_mini_batch_size == mini
    notices = [record for record in caplog.records if f"the dataset has {num_rows} rows" in record.message]
    assert len(notices) == (fitted != config) and all(record.levelno == logging.WARNING for record in notices)


def test_supervised_batch_of_a_small_dataset() -> None:
    def load(*overrides: str) -> Any:
        return load_config(SFTConfig, overrides, run_checks=False)

    assert fitted_to_rows(load(), 10).data.train_batch_size == 10
    assert fitted_to_rows(load(), 1000).data.train_batch_size == 256
    assert fitted_to_rows(load("data.train_batch_size=64"), 10).data.train_batch_size == 64


def test_defaults_of_a_caller_count_as_not_set() -> None:
    def load(*overrides: str) -> PPOConfig:
        return load_config(PPOConfig, overrides, run_checks=False, defaults={"data.train_batch_size": 64})

    assert load().data.train_batch_size == 64 and fitted_to_rows(load(), 10).data.train_batch_size == 10
    assert fitted_to_rows(load("data.train_batch_size=64"), 10).data.train_batch_size == 64


def test_old_log_probs_are_read_as_listed() -> None:
    """The config's tables, which `lockstep plan` reads without torch, and the functions themselves."""
    keys = {"old_log_probs", "entropys", "sum_pi_squared"}
    for name in AdvantageEstimator:
        read = {parameter.name for parameter in parameters_of(ADVANTAGE_ESTIMATORS.get(name))}
        assert may_read(name, *keys) == bool(read & keys), name
    prepared = {name for name in BUILT_IN_LOSSES if preparation_of(name) is not None}
    assert prepared == {name for name in BUILT_IN_LOSSES if is_prepared(name)} == {"clip_cov", "geo_mean", "kl_cov"}
