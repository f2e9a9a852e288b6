"""Files, presets and overrides become one configuration."""

import json
import logging
from pathlib import Path

import pytest

from lockstep.config.compose import load_config, to_yaml
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig


def load(overrides: list[str], **kwargs: object) -> PPOConfig:
    return load_config(PPOConfig, overrides, run_checks=False, **kwargs)  # type: ignore[arg-type]


def test_every_form_of_override() -> None:
    config = load(
        [
            "data.train_files=x.parquet",
            "data.val_files=['/a b/v.parquet','w.parquet']",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "+trainer.experiment_name='a, b'",
            "++trainer.logger=[console,tensorboard]",
            "trainer.total_training_steps=null",
            "trainer.val_before_train=False",
            "+data.apply_chat_template_kwargs={enable_thinking: false}",
            "data.apply_chat_template_kwargs.depth=2",
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
            "reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
            "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
            "critic.model.path=${actor_rollout_ref.model.path}",
            "actor_rollout_ref.model.path=/m",
        ]
    )
    assert config.data.train_files == ["x.parquet"]
    assert config.data.val_files == ["/a b/v.parquet", "w.parquet"]
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.trainer.experiment_name == "a, b"
    assert config.trainer.logger == ["console", "tensorboard"]
    assert config.trainer.total_training_steps is None
    assert config.trainer.val_before_train is False
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "depth": 2}
    assert config.reward_model.reward_kwargs == {"overlong_buffer_cfg": {"enable": True, "len": 4}}
    assert config.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)
    assert config.critic.model.path == "/m"


def test_the_last_override_wins() -> None:
    assert load(["trainer.seed=1", "trainer.seed=2"]).trainer.seed == 2


def test_tilde_resets_to_the_default() -> None:
    assert load(["trainer.seed=7", "~trainer.seed"]).trainer.seed == 1
    assert load(["rollout.n=3", "~actor_rollout_ref.rollout"]).actor_rollout_ref.rollout.n == 1
    with pytest.raises(ConfigError, match=r"~trainer\.sed: no such key\. Did you mean trainer\.seed"):
        load(["~trainer.sed"])


def test_home_folder_in_paths() -> None:
    config = load(["data.train_files=[~/a.parquet,~/b.parquet]", "actor_rollout_ref.model.path=~/m"])
    assert config.data.train_files == [f"{Path.home()}/a.parquet", f"{Path.home()}/b.parquet"]
    assert config.actor_rollout_ref.model.path == f"{Path.home()}/m"


def test_environment_in_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_SEED", "11")
    assert load(["trainer.seed=${oc.env:LOCKSTEP_TEST_SEED}"]).trainer.seed == 11
    escaped = load([r"trainer.project_name='\${trainer.seed}'", "trainer.seed=3"])
    assert escaped.trainer.project_name == "${trainer.seed}"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_unknown_key_suggests_the_most_similar(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_file=x: no such key\. Did you mean data\.train_files\?"):
        load([f"{prefix}data.train_file=x"])


def test_key_without_its_section_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"adv_estimator=grpo: no such key\. Did you mean algorithm\.adv_estimator\?"):
        load(["adv_estimator=grpo"])


def test_internal_fields_cannot_be_set() -> None:
    with pytest.raises(ConfigError, match="global_batch_info"):
        load(["actor_rollout_ref.actor.global_batch_info={dp_size: 2}"])


def test_override_that_cannot_be_parsed() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["trainer.seed", "trainer.project_name=a=b", "trainer.seed=1,2", "trainer.sed=1"])
    text = str(caught.value)
    assert "4 problems" in text
    assert "trainer.project_name=a=b: cannot be parsed" in text and "quote" in text
    assert "write a list as [a,b]" in text


def test_problems_of_every_kind_are_reported_together(files: dict[str, str]) -> None:
    overrides = [
        f"data.train_files={files['train']}",
        f"actor_rollout_ref.model.path={files['model']}",
        "trainer.placement=split",
        "trainer.sed=1",
        "actor_rollout_ref.actor.optim.lr=abc",
        "trainer.device=npu",
        "trainer.default_hdfs_dir=hdfs",
        "data.train_batch_size=10",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, overrides)
    assert sorted(problem.key for problem in caught.value.problems) == [
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "trainer.default_hdfs_dir",
        "trainer.device",
        "trainer.placement",
        "trainer.sed",
    ]
    assert "trainer.placement=split: has 3 pools" in str(caught.value)


def test_presets() -> None:
    config = load(["algorithm=grpo", "actor_rollout_ref.rollout.n=8"])
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.actor.use_kl_loss and config.actor_rollout_ref.rollout.n == 8
    assert load(["+algorithm=ppo"]).algorithm.adv_estimator == "gae"
    with pytest.raises(ConfigError, match=r"algorithm=gpro: no such preset\. Known: grpo, ppo\."):
        load(["algorithm=gpro"])
    with pytest.raises(ConfigError, match="trainer=fsdp: is a section"):
        load(["trainer=fsdp"])


def test_presets_named_by_verl_configurations(tmp_path: Path) -> None:
    assert load(["actor_rollout_ref=fsdp", "critic=fsdp", "data=rlhf"]) == load([])
    write(tmp_path, "my.yaml", "defaults: [{actor@actor_rollout_ref.actor: dp_actor}, _self_]\n")
    assert load([], config_name="my", config_dir=tmp_path) == load([])
    write(tmp_path, "mine.yaml", "defaults: [ppo_trainer, _self_]\ntrainer: {seed: 3}\n")
    assert load([], config_name="mine", config_dir=tmp_path).trainer.seed == 3


def test_two_bounds_are_not_a_number() -> None:
    for written in ("0.5_2.0", "0.5_2", "'0.5_2'"):
        correction = load([f"algorithm.rollout_correction.rollout_rs_threshold={written}"]).algorithm.rollout_correction
        assert correction.rollout_rs_threshold == written.strip("'")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_user_file(tmp_path: Path) -> None:
    path = write(tmp_path, "my.yaml", "trainer:\n  total_epochs: 2\n  seed: 5\ncritic:\n  optim: {lr: 5e-6}\ndata:\n")
    for arguments in ({"config_name": "my", "config_dir": tmp_path}, {"config_name": str(path)}):
        config = load(["trainer.seed=6"], **arguments)
        assert (config.trainer.total_epochs, config.trainer.seed, config.critic.optim.lr) == (2, 6, 5e-6)


def test_user_file_with_presets_and_its_own_groups(tmp_path: Path) -> None:
    text = "defaults:\n  - algorithm: grpo\n  - _self_\ntrainer: {total_epochs: 2}\n"
    write(tmp_path, "my.yaml", text)
    write(tmp_path, "size/tiny.yaml", "# @package _global_\ndata: {train_batch_size: 8}\n")
    config = load(["size=tiny"], config_name="my", config_dir=tmp_path)
    assert (config.algorithm.adv_estimator, config.data.train_batch_size) == ("grpo", 8)
    assert load(["algorithm=ppo"], config_name="my", config_dir=tmp_path).algorithm.adv_estimator == "gae"


def test_dotted_names_in_a_file(tmp_path: Path) -> None:
    below = "reward_model.reward_kwargs.overlong_buffer_cfg"
    text = f"trainer.seed: 3\nactor_rollout_ref:\n  actor.optim.lr: 2e-6\n{below}.enable: true\n{below}.len: 4\n"
    write(tmp_path, "my.yaml", text)
    config = load([], config_name="my", config_dir=tmp_path)
    assert config.reward_model.reward_kwargs == {"overlong_buffer_cfg": {"enable": True, "len": 4}}
    assert (config.trainer.seed, config.actor_rollout_ref.actor.optim.lr) == (3, 2e-6)


def test_an_unknown_key_in_a_file(tmp_path: Path) -> None:
    write(tmp_path, "my.yaml", "trainer:\n  total_epoch: 2\nextra:\n  a: 1\n  b: 2\n")
    with pytest.raises(ConfigError) as caught:
        load([], config_name="my", config_dir=tmp_path)
    assert [problem.key for problem in caught.value.problems] == ["trainer.total_epoch", "extra"]


def test_missing_or_invalid_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-name=none: no none\.yaml.*Known: .*ppo_trainer"):
        load([], config_name="none")
    with pytest.raises(ConfigError, match="--config-dir"):
        load([], config_name="my", config_dir=tmp_path / "nowhere")
    write(tmp_path, "bad.yaml", "a: [1\n")
    with pytest.raises(ConfigError, match="--config-name=bad"):
        load([], config_name="bad", config_dir=tmp_path)


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = load(["algorithm=grpo", "trainer.experiment_name='1'", "data.train_files=[a.parquet]", "trainer.seed=9"])
    write(tmp_path, "saved.yaml", to_yaml(config))
    assert load([], config_name="saved", config_dir=tmp_path) == config


def test_hydra_keys_log_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(["hydra.run.dir=/tmp/x"])
    assert "hydra.run.dir has no effect" in caplog.text


def test_file_given_as_an_override_suggests_config_name() -> None:
    with pytest.raises(ConfigError, match=r"to load a configuration file, use --config-name my\.yaml"):
        load_config(overrides=["my.yaml"], run_checks=False)


def test_preset_that_replaces_a_setting_of_the_file_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "my.yaml").write_text("actor_rollout_ref: {rollout: {n: 8}}\ntrainer: {seed: 3}\n")
    config = load(["algorithm=grpo", "trainer.seed=4"], config_name="my", config_dir=tmp_path)
    assert config.actor_rollout_ref.rollout.n == 5
    message = (
        "algorithm=grpo sets actor_rollout_ref.rollout.n=5, not 8 as my.yaml; add actor_rollout_ref.rollout.n=8 to keep"
    )
    assert message in caplog.text and "trainer.seed" not in caplog.text


def test_run_as_a_model_is_its_newest_checkpoint_of_that_moment(tmp_path: Path) -> None:
    run = tmp_path / "first"
    for step, sequence in ((5, 2), (9, 1)):
        (run / f"global_step_{step}").mkdir(parents=True)
        manifest = {"step": step, "sequence": sequence, "saved_at": 0, "files": {}}
        (run / f"global_step_{step}" / "manifest.json").write_text(json.dumps(manifest))
    config = load([f"actor_rollout_ref.model.path={run}", f"data.tokenizer={run}", "data.train_files=gsm8k.parquet"])
    newest = str(run / "global_step_5")
    assert config.actor_rollout_ref.model.path == config.critic.model.path == config.data.tokenizer == newest
    assert config.trainer.experiment_name.startswith("first-step5")
    assert load([f"actor_rollout_ref.model.path={run}/global_step_9"]).actor_rollout_ref.model.path.endswith("_9")
