"""What a program or its user sets is kept; defaults that depend on it are those of `lockstep ppo`."""

import re
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import lockstep.verl.trainer  # noqa: F401 (adds ppo_trainer to Hydra)
from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.derived_defaults import IF_SET
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import get_in, keys, to_plain
from lockstep.verl._config import default_tree, typed_config, view

ESTIMATOR, N = "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"
KL, COEF = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
EXPERIMENT = "trainer.experiment_name"

SETTINGS = [
    [],
    [f"{COEF}=0.001"],  # the default, written out
    [f"{COEF}=0.01"],
    [f"{KL}=false", f"{COEF}=0.01"],
    [f"{KL}=false", f"{COEF}=0.001", f"{ESTIMATOR}=grpo", f"{N}=1"],
    [f"{ESTIMATOR}=grpo"],
    ["trainer.placement=split", "trainer.async_mode=colocated"],
    ["trainer.placement=split", "actor_rollout_ref.rollout.free_cache_engine=true"],
    ["trainer.async_mode=colocated", "algorithm.rollout_correction.rollout_is=null"],
    ["trainer.async_mode=colocated", "algorithm.rollout_correction.bypass_mode=false"],
    ["actor_rollout_ref.rollout.over_sample_rate=0.5", "actor_rollout_ref.rollout.mode=sync"],
    ["actor_rollout_ref.model.path=/models/Tiny", "data.train_files=/data/gsm8k/train.parquet"],
    [f"{EXPERIMENT}=mine", "trainer.project_name=ours"],
]


def composed(settings: list[str]) -> DictConfig:
    """As `hydra.main(config_path=None, config_name="ppo_trainer")` composes it."""
    GlobalHydra.instance().clear()
    with hydra.initialize(config_path=None, version_base=None):
        return hydra.compose("ppo_trainer", settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "defaults")
def test_the_same_settings_mean_the_same_in_a_program(settings: list[str]) -> None:
    config, expected = composed(settings), to_plain(load_config(PPOConfig, settings, run_checks=False))
    for name in IF_SET:
        if name in keys(PPOConfig):  # the program reads a value before the trainer exists
            assert OmegaConf.select(config, name) == get_in(expected, name, None), name
    assert to_plain(typed_config(config, run_checks=False)) == expected
    OmegaConf.resolve(config)
    assert to_plain(typed_config(config, run_checks=False)) == expected
    full = view(config, typed_config(config, run_checks=False))
    assert to_plain(typed_config(full, run_checks=False)) == expected


def test_a_program_may_set_values_later_and_by_interpolation() -> None:
    config: Any = OmegaConf.create(default_tree())
    assert config.algorithm.use_kl_in_reward is False and config.actor_rollout_ref.rollout.n == 1
    config.algorithm.kl_ctrl.kl_coef = 0.001
    config.algorithm.adv_estimator = "${program.estimator}"
    OmegaConf.update(config, "program.estimator", "grpo", force_add=True)
    assert config.algorithm.use_kl_in_reward is True and config.actor_rollout_ref.rollout.n == 5
    assert config.actor_rollout_ref.actor.rollout_n == 5  # follows the derived value
    typed = typed_config(config, run_checks=False)
    assert typed.algorithm.use_kl_in_reward and typed.actor_rollout_ref.rollout.n == 5
    config.algorithm.use_kl_in_reward = False
    config.actor_rollout_ref.rollout.n = 1
    typed = typed_config(config, run_checks=False)
    assert not typed.algorithm.use_kl_in_reward and typed.actor_rollout_ref.rollout.n == 1


def test_a_reference_that_cannot_be_resolved_does_not_hide_other_keys() -> None:
    config: Any = OmegaConf.create(default_tree())
    config.algorithm.adv_estimator = "${oc.env:NO_SUCH_VARIABLE_OF_A_TEST}"
    assert config.actor_rollout_ref.rollout.n == 1


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ({"use_kl_in_reward": False, "kl_ctrl": {"kl_coef": 0.01}}, {"use_kl_in_reward", "kl_ctrl"}),
        ({"use_kl_in_reward": False, "kl_ctrl": {"kl_coef": 0.001}}, {"use_kl_in_reward", "kl_ctrl"}),
        ({"gamma": 1.0}, set()),
    ],
)
def test_a_converted_config_means_what_the_file_says(
    written: dict[str, Any], kept: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump({"algorithm": {**written, "adv_estimator": "grpo"}}))
    assert cli.main(["convert", str(file), "-o", str(out)]) in (0, 1)
    capsys.readouterr()
    settings = yaml.safe_load(re.sub(r"^#.*\n", "", out.read_text(), flags=re.M))
    assert settings["algorithm"].keys() - {"adv_estimator"} == kept
    config = load_config(PPOConfig, config_name=str(out), run_checks=False)
    assert config.algorithm.use_kl_in_reward is False


def test_a_converted_group_size_of_one_stays(tmp_path: Path) -> None:
    file, out = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    file.write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 1}}\n")
    cli.main(["convert", str(file), "-o", str(out)])
    assert load_config(PPOConfig, config_name=str(out), run_checks=False).actor_rollout_ref.rollout.n == 1
