"""Settings that read environment variables: resolved in memory, as written everywhere else."""

from dataclasses import replace

import pytest
import yaml

from lockstep.config.commandline import config_from_command_line
from lockstep.config.compose import load_config, to_yaml
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import as_written, to_plain
from lockstep.config.sft import SFTConfig

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("NODES", "2")


def config_of(*overrides: str) -> PPOConfig:
    return load_config(PPOConfig, overrides, run_checks=False)


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("trainer.project_name=${oc.env:TOKEN}", "project_name", SECRET),
        ("trainer.project_name=a-${oc.env:TOKEN}-b", "project_name", f"a-{SECRET}-b"),
        ("trainer.nnodes='${oc.decode:${oc.env:NODES}}'", "nnodes", 2),
        ("trainer.nnodes=${oc.env:NODES}", "nnodes", 2),
        ("trainer.logger=[console,'${oc.env:TOKEN}']", "logger", ["console", SECRET]),
    ],
)
def test_values_are_in_memory_only(override: str, key: str, value: object) -> None:
    config = config_of(override)
    assert getattr(config.trainer, key) == value
    written = override.partition("=")[2].strip("'")
    if key != "logger":
        assert as_written(config)["trainer"][key] == written
    assert SECRET not in to_yaml(config) and SECRET in str(to_plain(config)) + SECRET * (key == "nnodes")


def test_what_follows_such_a_setting_is_as_written_too() -> None:
    """`default_local_dir` contains the project's name by default, and a mapping refers to it."""
    config = config_of(
        "trainer.project_name=${oc.env:TOKEN}",
        "+custom_reward_function.reward_kwargs={a: '${trainer.project_name}', b: 1}",
    )
    assert (
        config.custom_reward_function.reward_kwargs == {"a": SECRET, "b": 1}
        and SECRET in config.trainer.default_local_dir
    )
    text = to_yaml(config)
    assert SECRET not in text
    assert load_config(PPOConfig, layers=[yaml.safe_load(text)], run_checks=False) == config


def test_settings_without_variables_are_resolved() -> None:
    config = config_of("trainer.project_name=a", "trainer.experiment_name=b")
    assert as_written(config) == to_plain(config)
    assert as_written(config)["trainer"]["default_local_dir"] == "checkpoints/a/b"


def test_a_key_that_was_replaced_later_is_not_hidden() -> None:
    config = config_of("trainer.project_name=${oc.env:TOKEN}")
    config = replace(config, trainer=replace(config.trainer, project_name="other"))
    assert as_written(config)["trainer"]["project_name"] == "other"


def test_messages_do_not_show_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of("trainer.nnodes=${oc.env:TOKEN}")
    assert "trainer.nnodes=${oc.env:TOKEN}: must be an integer" in str(raised.value) and SECRET not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, ["algorithm.adv_kwargs={beta: '${oc.env:TOKEN}'}"])
    assert "adv_kwargs.beta" in str(raised.value) and SECRET not in str(raised.value)
    assert config_from_command_line(["--cfg", "job", "trainer.project_name=${oc.env:TOKEN}"], SFTConfig) is None
    out = capsys.readouterr().out
    assert "project_name: ${oc.env:TOKEN}" in out and SECRET not in out
