"""The `lockstep` command and the shared command line of training programs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from lockstep import __version__, cli
from lockstep.config.commandline import config_from_command_line


def run(*arguments: str, program: str = "lockstep.cli") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockstep {__version__}\n"
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(program in usage for program in cli.PROGRAMS)
    assert cli.main([]) == 2


def test_unknown_program_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    assert capsys.readouterr().err == "lockstep: unknown program 'docter'; did you mean doctor?\n"


def test_wrong_key_exits_with_2_and_no_traceback() -> None:
    result = run("ppo", "bad.key=1", "trainer.sed=2")
    assert result.returncode == 2
    assert "bad.key=1: no such key" in result.stderr and "Did you mean trainer.seed?" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_unsupported_features_are_reported_with_all_other_errors(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "actor_rollout_ref.rollout.name=trtllm",
        "actor_rollout_ref.model.mtp.enable=true",
        "trainer.logger=[trackio]",
    ]
    with pytest.raises(SystemExit) as end:
        config_from_command_line([*asked, "algorithm.adv_estimator=grpo", "rollout.n=1"])
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.count("not supported") == 3
    assert "data.train_files: must name" in text and "actor_rollout_ref.rollout.n=1: grpo compares" in text


def test_config_of_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grpo.yaml").write_text("defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}\n")
    arguments = ["ppo", "--config-path", str(tmp_path), "--config-name", "grpo", "--cfg", "job", "+rollout.n=8"]
    assert cli.main(arguments) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["algorithm"]["adv_estimator"], printed["actor_rollout_ref"]["rollout"]["n"]) == ("grpo", 8)


def test_config_errors_and_cfg_do_not_import_torch() -> None:
    script = (
        "import sys\nfrom lockstep import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    for arguments in (["ppo", "bad.key=1"], ["grpo", "--cfg", "job"], ["--help"], ["rollouts", "nowhere"]):
        result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr


def test_cfg_job_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ppo", "--cfg", "job", "data.max_response_length=33"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["actor_rollout_ref"]["rollout"]["response_length"] == 33
    assert "global_batch_info" not in printed["critic"]


@pytest.mark.parametrize("program", list(cli.PROGRAMS))
def test_every_program_has_help(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main([program, "--help"])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 0
    assert f"usage: lockstep {program}" in capsys.readouterr().out


def test_grpo_is_ppo_with_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for command in (["grpo"], ["ppo", "algorithm=grpo"]):
        assert cli.main([*command, "--cfg", "job", "data.train_batch_size=8"]) == 0
        printed.append(yaml.safe_load(capsys.readouterr().out))
    assert printed[0] == printed[1] and printed[0]["algorithm"]["adv_estimator"] == "grpo"
    assert cli.main(["grpo", "algorithm=ppo"]) == 2
    assert capsys.readouterr().err == (
        "lockstep grpo: algorithm=ppo contradicts algorithm=grpo; use `lockstep ppo algorithm=ppo`\n"
    )
    assert cli.main(["grpo", "algorithm=grpo", "algorithm.adv_estimator=rloo", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["adv_estimator"] == "rloo"


def test_ppo_help_points_to_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ppo", "--help"]) == 0
    text = capsys.readouterr().out
    assert "key=value" in text and "docs/config.md" in text


def test_options_between_overrides(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "my.yaml").write_text(f"data: {{train_files: {tmp_path}/train.jsonl}}\ntrainer: {{seed: 4}}\n")
    model = f"actor_rollout_ref.model.path={tmp_path}/model"
    for option in ("--config-path", "--config-dir"):
        config = config_from_command_line([model, "--config-name=my", option, str(tmp_path), "trainer.test_freq=-1"])
        assert config is not None and config.trainer.seed == 4


def test_wrong_option_exits_with_2() -> None:
    with pytest.raises(SystemExit) as end:
        config_from_command_line(["--multirun"])
    assert end.value.code == 2


def test_doctor_reports_versions_and_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("torch", "python", "memory", "swanlab", "lockstep-rl[swanlab]"))
    assert cli.main(["doctor", "now"]) == 2


def test_doctor_knows_every_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = {**project["optional-dependencies"]}
    del extras["dev"]
    assert set(cli.EXTRAS) == set(extras)
    for extra, packages in extras.items():
        assert any(package.startswith(name) for package in packages for name in cli.EXTRAS[extra]), extra


def test_settings_with_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["ppo", "--trainer.total_epochs=3"])
    assert "settings are key=value, without dashes" in capsys.readouterr().err
