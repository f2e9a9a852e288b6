"""Checks across keys: each finds its fault, names the key and says what to set."""

import logging
from pathlib import Path

import pytest

from lockstep.config.checks import AGGREGATIONS, KL_ESTIMATORS, RANGES
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.implied import GROUP_ESTIMATORS
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import keys


def test_the_minimal_configuration_passes(minimal: list[str]) -> None:
    load_config(PPOConfig, minimal)


def test_ranges_name_real_fields() -> None:
    known = keys(PPOConfig)
    assert set(RANGES) <= {*known, *(key.field for key in known.values())}


def test_names_are_those_of_the_algorithms() -> None:
    from lockstep.algorithms.advantages.registry import ADVANTAGE_ESTIMATORS
    from lockstep.algorithms.kl import KL_ESTIMATORS as KNOWN_ESTIMATORS
    from lockstep.algorithms.losses.aggregate import LOSS_AGG_MODES

    assert set(ADVANTAGE_ESTIMATORS) >= GROUP_ESTIMATORS
    assert AGGREGATIONS == LOSS_AGG_MODES
    assert set(KL_ESTIMATORS) == set(KNOWN_ESTIMATORS) - {"k1", "k2", "k3"}


def test_what_must_be_given() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [])
    assert [problem.key for problem in caught.value.problems] == ["data.train_files", "actor_rollout_ref.model.path"]


ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"


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
        (
            ["trainer.save_freq=-2"],
            "trainer.save_freq=-2: must be 1 or more, -1 for the last step alone, or 0 for never",
        ),
        (["trainer.total_training_steps=0"], "trainer.total_training_steps=0: must be 1 or more, or null"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path: must be the global_step_N folder"),
        (["critic.enable=false"], "critic.enable=false: gae takes its values from a critic"),
        (["critic=null"], "critic.enable=false: gae takes its values from a critic"),
        (["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n=1: grpo compares the samples of one prompt"),
        (["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n=1: rloo compares the samples of one prompt"),
        ([f"{ACTOR}.use_kl_loss=true", f"{REF}=null"], f"{ACTOR}.use_kl_loss=true: KL is measured against a reference"),
        (["algorithm.use_kl_in_reward=true", "ref=null"], f"reference policy, and {REF}.enable is false"),
        ([f"{ACTOR}.rollout_n=4"], f"{ACTOR}.rollout_n=4: must be {ROLLOUT}.n=1"),
        ([f"{ACTOR}.loss_agg_mode=mean"], f"{ACTOR}.loss_agg_mode=mean: must be one of token-mean, token-sum"),
        ([f"{ACTOR}.kl_loss_type=k4"], f"{ACTOR}.kl_loss_type=k4: must be one of kl, abs, mse, low_var_kl"),
        (
            ["algorithm.filter_groups.enable=true"],
            f"{ROLLOUT}.n=1: samples of one prompt are compared, and there is one",
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.calculate_log_probs=false"],
            "algorithm.rollout_correction.rollout_is=token: needs the rollout's own log-probs",
        ),
        (
            ["data.sampler.class_path=pkg://m"],
            "data.sampler.class_name: must name the class in data.sampler.class_path",
        ),
        (
            ["data.sampler={class_path: pkg://m, class_name: A}", "data.dataloader_num_workers=2"],
            "data.dataloader_num_workers=2: a sampler of your own works in the controller; set 0",
        ),
        (
            ["algorithm.kl_penalty=full"],
            "algorithm.kl_penalty=full: not in this build: KL is estimated from the sampled",
        ),
        (
            ["actor_rollout_ref.hybrid_engine=false"],
            "hybrid_engine=false: not in this build: it parts nothing; set true, and trainer.placement=split to part",
        ),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], "not in this build: each worker generates with the whole model"),
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
        (["algorithm.adv_estimator=grpo"], f"{ROLLOUT}.n is not set, and grpo compares the samples of a prompt: 5"),
        ([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], "KL counts in the reward and in the loss"),
        ([f"{ROLLOUT}.n=4", f"{ROLLOUT}.do_sample=false"], "the 4 samples of a prompt will be the same"),
        ([f"{ROLLOUT}.response_length=64"], "response_length=64 differs from data.max_response_length=512"),
        (["trainer.resume_from_path=x"], "counts only with trainer.resume_mode=resume_path, and that is auto"),
        (["trainer.test_freq=5"], "trainer.test_freq=5 without data.val_files"),
        (["trainer.max_restarts=2"], "trainer.max_restarts without trainer.save_freq: there is no checkpoint to go on"),
    ],
)
def test_what_is_likely_not_meant_is_a_warning(
    minimal: list[str], overrides: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, [*minimal, *overrides])
    assert message in caplog.text


def test_impossible_combinations_are_reported_at_once(minimal: list[str]) -> None:
    overrides = [
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=1",
        f"{ACTOR}.use_kl_loss=true",
        f"{REF}=null",
        "data.train_batch_size=100",
        f"{ACTOR}.ppo_mini_batch_size=64",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=300",  # three ranks that share a sequence have 900
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ACTOR}.ulysses_sequence_parallel_size=3",
        "trainer.n_gpus_per_node=8",
        "trainer.logger=[console,vemlp_wandb]",
        "actor_rollout_ref.model.lora_rank=16",
        "data.train_file=x",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *overrides])
    assert {problem.key for problem in caught.value.problems} == {
        f"{ROLLOUT}.n",
        f"{ACTOR}.use_kl_loss",
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ROLLOUT}.name",
        f"{ROLLOUT}.multi_turn.enable",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "trainer.logger",
        "actor_rollout_ref.model.lora_rank",
        "data.train_file",
    }
    assert len(caught.value.problems) == 10
    not_built = [problem.key for problem in caught.value.problems if "not in this build" in problem.message]
    assert not_built == [
        "actor_rollout_ref.rollout.multi_turn.enable",
        "actor_rollout_ref.model.lora_rank",
        "actor_rollout_ref.rollout.name",
        "trainer.logger",
    ]


def test_a_run_may_say_that_it_has_no_reference(minimal: list[str]) -> None:
    config = load_config(PPOConfig, [*minimal, "ref=null"])
    assert config.actor_rollout_ref.ref.enable is False
