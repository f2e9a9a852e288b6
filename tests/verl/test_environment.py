"""The config of a ported program as Lockstep's own."""

import pytest
from omegaconf import OmegaConf

from lockstep.config.compose import to_yaml
from lockstep.config.schema import as_written
from lockstep.verl._config import typed_config

SECRET = "s3cr3t"


def test_environment_variables_are_saved_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the program itself may stand between a setting and the variable."""
    monkeypatch.setenv("TOKEN", SECRET)
    given = OmegaConf.create(
        {
            "mine": {"token": "${oc.env:TOKEN}"},
            "trainer": {"project_name": "${oc.env:TOKEN}"},
            "custom_reward_function": {"reward_kwargs": {"direct": "${oc.env:TOKEN}", "own": "${mine.token}", "n": 1}},
        }
    )
    config = typed_config(given, run_checks=False)
    assert config.custom_reward_function.reward_kwargs == {"direct": SECRET, "own": SECRET, "n": 1}
    assert SECRET not in to_yaml(config)
    assert as_written(config)["custom_reward_function"]["reward_kwargs"]["own"] == "${mine.token}"


def test_lists_of_a_program_may_refer_to_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    given = OmegaConf.create(
        {"root": "/d", "token": "${oc.env:TOKEN}", "data": {"train_files": ["${root}/a.parquet", "${token}/b.parquet"]}}
    )
    config = typed_config(given, run_checks=False)
    assert config.data.train_files == ["/d/a.parquet", f"{SECRET}/b.parquet"]
    assert SECRET not in to_yaml(config)
    del given.data.train_files[1]
    assert typed_config(given, run_checks=False).data.train_files == ["/d/a.parquet"]
