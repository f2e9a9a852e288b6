"""Short names: one table for the command line, YAML files and `lockstep.train`."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import flat_values, keys
from lockstep.config.sft import SFTConfig
from lockstep.config.short_names import SHORT_NAMES, USUAL_NAMES, suggestion
from lockstep.verl._config import default_tree, typed_config


def loaded(cls: type, *overrides: str, **options: Any) -> dict[str, Any]:
    return flat_values(load_config(cls, list(overrides), run_checks=False, **options))


@pytest.mark.parametrize("cls", SHORT_NAMES)
def test_every_name_is_a_key(cls: type) -> None:
    assert set(SHORT_NAMES[cls].values()) <= set(keys(cls))
    assert set(SHORT_NAMES[cls]).isdisjoint(keys(cls))


def test_the_command_is_the_one_with_long_keys(files: dict[str, str]) -> None:
    actor = "actor_rollout_ref.actor"
    short = ["model=org/name", "data=a.parquet", "val_data=[b.parquet,c.parquet]", "reward=mine.py", "n=8", "lr=1e-6"]
    short += ["steps=100", "batch_size=16", "max_prompt_length=7", "max_response_length=9", "run_dir=runs/x"]
    short += ["loss=mine.py:loss", "loss_kwargs.beta=2", "adv_kwargs={scale: 3}"]
    long = [
        "actor_rollout_ref.model.path=org/name",
        "data.train_files=a.parquet",
        "data.val_files=[b.parquet,c.parquet]",
    ]
    long += ["custom_reward_function.path=mine.py", "actor_rollout_ref.rollout.n=8", f"{actor}.optim.lr=1e-6"]
    long += ["trainer.total_training_steps=100", "data.train_batch_size=16", f"{actor}.ppo_mini_batch_size=16"]
    long += ["data.max_prompt_length=7", "data.max_response_length=9", "trainer.default_local_dir=runs/x"]
    long += [f"{actor}.policy_loss.loss_mode=mine.py:loss", f"{actor}.policy_loss.loss_kwargs.beta=2"]
    long += ["algorithm.adv_kwargs.scale=3"]
    assert loaded(PPOConfig, *short) == loaded(PPOConfig, *long)


@pytest.mark.parametrize("cls", [SFTConfig, RMConfig, DPOConfig])
def test_other_training_programs(cls: type) -> None:
    values = loaded(cls, "model=org/name", "data=a.jsonl", "lr=1e-3", "steps=3", "batch_size=8", "max_length=99")
    assert values["model.path"] == "org/name" and values["data.train_files"] == ["a.jsonl"]
    assert (values["optim.lr"], values["data.train_batch_size"], values["data.max_length"]) == (1e-3, 8, 99)


def test_generation_and_evaluation() -> None:
    values = loaded(GenerationConfig, "model=org/name", "data=a.jsonl", "n=2", "max_response_length=9")
    assert (values["model.path"], values["data.path"], values["data.n_samples"]) == ("org/name", ["a.jsonl"], 2)
    values = loaded(EvaluationConfig, "data=a.jsonl", "reward=gsm8k")
    assert values["custom_reward_function.reward_kwargs"] == {"scorer": "gsm8k"}


def test_sections_and_presets_of_the_same_name_keep_their_meaning(tmp_path: Path) -> None:
    assert loaded(PPOConfig, "data=rlhf", "model.lora_rank=8")["actor_rollout_ref.model.lora_rank"] == 8
    assert loaded(PPOConfig, "data={train_files: [a.jsonl]}")["data.train_files"] == ["a.jsonl"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("train_files: [of_the_group.jsonl]")
    (tmp_path / "run.yaml").write_text("model: org/name\nsteps: 5\nreward: {custom_reward_function: {path: my.py}}\n")
    folder = {"config_name": "run", "config_dir": tmp_path}
    assert loaded(PPOConfig, "data=mine", **folder)["data.train_files"] == ["of_the_group.jsonl"]
    values = loaded(PPOConfig, "data=mine.jsonl", "steps=6", **folder)
    assert values["data.train_files"] == ["mine.jsonl"] and values["trainer.total_training_steps"] == 6
    assert values["actor_rollout_ref.model.path"] == "org/name"
    assert values["custom_reward_function.path"] == "my.py"
    assert loaded(PPOConfig, "n=8", "~n")["actor_rollout_ref.rollout.n"] == 1


def test_a_mini_batch_that_is_set_stays() -> None:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert loaded(PPOConfig, f"{key}=4", "batch_size=16")[key] == 4
    assert loaded(PPOConfig, "data.train_batch_size=512")[key] == 256


@pytest.mark.parametrize(
    "overrides",
    [["n=8", "actor_rollout_ref.rollout.n=4"], ["rollout.n=4", "n=8"], ["data=a.jsonl", "data.train_files=[b]"]],
)
def test_short_and_long_with_other_values_contradict(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(PPOConfig, *overrides)
    (problem,) = error.value.problems
    first, second = (override.replace("[b]", "b") for override in overrides)
    assert str(problem).replace("[b]", "b") == f"{second}: contradicts {first}; both set the same key"
    assert str(problem) in str(error.value)
    loaded(PPOConfig, "data=a.jsonl", "data.train_files=[a.jsonl]", "n=8", "rollout.n=8")
    loaded(PPOConfig, "n=4", "n=8")  # the last one wins, as for every key


def test_errors_use_the_names_that_were_written(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            PPOConfig, [f"model={files['model']}", f"data={files['train']}", "batch_size=0", "algorithm=grpo", "n=1"]
        )
    assert [str(line).partition(":")[0] for line in str(error.value).splitlines()[1:]] == [
        "  - batch_size=0",
        "  - n=1",
    ]
    assert [problem.key for problem in error.value.problems] == ["data.train_batch_size", "actor_rollout_ref.rollout.n"]
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=0: must"):
        load_config(PPOConfig, [f"model={files['model']}", f"data={files['train']}", "data.train_batch_size=0"])


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        *(("learning_rate", "lr"), ("num_generations", "n"), ("max_steps", "steps"), ("output_dir", "run_dir")),
        *(("per_device_train_batch_size", "batch_size"), ("max_completion_length", "max_response_length")),
        *(("num_train_epochs", "trainer.total_epochs"), ("beta", "actor_rollout_ref.actor.kl_loss_coef")),
        *(("stpes", "steps"), ("modle", "model")),
        ("tools", "actor_rollout_ref.rollout.multi_turn.function_tool_path"),
    ],
)
def test_usual_names_of_other_libraries_are_recognised(written: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"{written}=1: no such key\. Did you mean {ours}( \(|\?)"):
        loaded(PPOConfig, f"{written}=1")


def test_every_suggestion_exists() -> None:
    for name in USUAL_NAMES:
        if name not in ("max_seq_length", "max_seq_len"):  # of the other programs
            assert suggestion(PPOConfig, name), name
    assert suggestion(SFTConfig, "learning_rate") == "lr (optim.lr)"
    assert suggestion(SFTConfig, "warmup_ratio") == "optim.lr_warmup_steps_ratio"


def test_a_program_written_on_verl_keeps_its_own_keys() -> None:
    typed = typed_config({**default_tree(), "lr": 3, "steps": 7, "n": 9}, run_checks=False)
    assert typed.trainer.total_training_steps is None and typed.actor_rollout_ref.rollout.n == 1
