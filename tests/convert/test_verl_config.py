"""`lockstep convert`: configs and scripts of verl; the results load."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SFTConfig
from lockstep.convert.verl_config import commands_of

DEFAULTS = Path(__file__).parents[1] / "config" / "verl_defaults.yaml"

SCRIPT = r"""#!/bin/bash
set -x
export MODEL=${MODEL:-Qwen/Qwen2.5-0.5B}
N=4  # samples
ENGINE=trtllm nproc=2
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$DATA/train.parquet', '/a b/c.parquet']" \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.max_grad_norm=0.5 \
    actor_rollout_ref.rollout.n=${N} actor_rollout_ref.rollout.name=$ENGINE \
    +actor_rollout_ref.rollout.layered_summon=True \
    trainer.logger='["console"]' $@ 2>&1 | tee train.log
torchrun --standalone --nproc_per_node=$nproc -m verl.trainer.fsdp_sft_trainer \
    model.partial_pretrain=$MODEL data.train_files=sft.parquet optim.warmup_steps_ratio=0.1
python3 -m http.server
"""


def convert(*words: object) -> int:
    return cli.main(["convert", *map(str, words)])


def test_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert convert(tmp_path / "run.sh") == 1  # trtllm is refused
    printed = capsys.readouterr()
    assert printed.err == "1 setting to look at: see `refused` and `to fix` in the comments\n"
    comments = [line for line in printed.out.splitlines() if line.startswith("#")]
    actor = "actor_rollout_ref.actor"
    assert comments[0] == f"# renamed: {actor}.max_grad_norm is read as {actor}.grad_clip"
    assert comments[1] == "# added, because verl's default differs: trainer.n_gpus_per_node=8"
    assert comments[2].startswith("# left out, no effect: actor_rollout_ref.rollout.layered_summon: ")
    assert comments[3].startswith("# left out, refused: actor_rollout_ref.rollout.name=trtllm: not supported: ")
    assert comments[4] == "# renamed: model.partial_pretrain is read as model.path"
    commands = re.sub(r"\\\n", " ", printed.out).replace("$DATA", "/data")
    ppo, sft = (shlex.split(line) for line in commands.splitlines() if line and not line.startswith("#"))
    assert ppo[:2] == ["lockstep", "ppo"] and ppo[-1] == "$@" and "$@" not in sft
    config = load_config(PPOConfig, ppo[2:-1], run_checks=False)
    assert config.data.train_files == ["/data/train.parquet", "/a b/c.parquet"]
    assert config.actor_rollout_ref.actor.grad_clip == 0.5 and config.actor_rollout_ref.rollout.n == 4
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B" and config.trainer.logger == ["console"]
    assert config.trainer.n_gpus_per_node == 8
    launcher = ["torchrun", "--standalone", "--nproc_per_node=2", "-m", "lockstep.trainer.fsdp_sft_trainer"]
    assert sft[:5] == launcher
    assert load_config(SFTConfig, sft[5:], run_checks=False).optim.lr_warmup_steps_ratio == 0.1


def test_vllm_is_kept_and_need_not_be_installed_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"
    files = "data.train_files=x.parquet actor_rollout_ref.model.path=/m"
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    load_format = "actor_rollout_ref.rollout.load_format=dummy_dtensor trainer.n_gpus_per_node=8"
    (tmp_path / "run.sh").write_text(f"python -m {command} {files} {tp} {load_format}")
    assert convert(tmp_path / "run.sh") == 0
    printed = capsys.readouterr().out
    for setting in ("name=vllm", "tensor_model_parallel_size=4", "load_format=dummy"):
        assert f"    actor_rollout_ref.rollout.{setting}" in printed
    assert "to fix" not in printed and "refused" not in printed


def test_values_that_are_not_served_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(
        "python -m verl.trainer.main_ppo data.train_files=x.parquet actor_rollout_ref.model.path=/m trainer.nnodes=1 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=hf "
        "data.train_batch_size=many trainer.bogus=1"
    )
    assert convert(tmp_path / "run.sh") == 1
    printed = capsys.readouterr().out
    assert "# left out, refused: trainer.bogus=1: no such key" in printed
    assert re.search(
        r"# to fix: actor_rollout_ref.rollout.tensor_model_parallel_size=2: .*set 1, or actor_rollout_ref.rollout.name=embedded"
        r" or vllm\n",
        printed,
    )
    assert "# to fix: data.train_batch_size=many: " in printed and "no such f" not in printed
    assert "    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\\n" in printed


def test_whole_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    assert convert(DEFAULTS, "-o", out) == 0
    text = out.read_text()
    assert "# to fix:" not in text and "# left out, refused:" not in text
    assert "# renamed: ray_kwargs.ray_init.* is read as ray_init.*" in text
    settings = yaml.safe_load(text)
    assert settings["trainer"]["n_gpus_per_node"] == 8 and "lr" not in text.split("\n", 20)[-1].split()
    config = load_config(PPOConfig, config_name=str(out), run_checks=False)
    assert config.trainer.n_gpus_per_node == 8 and config.critic.checkpoint.load_contents == [
        "model",
        "optimizer",
        "extra",
    ]
    assert convert(DEFAULTS, "-o", out) == 2 and "exists; add --overwrite" in capsys.readouterr().err


def test_config_of_sft_and_of_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sft.yaml").write_text("model: {partial_pretrain: /m}\ndata: {train_batch_size: 32}\n")
    assert convert(tmp_path / "sft.yaml") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# lockstep sft ") and yaml.safe_load(printed) == {
        "model": {"path": "/m"},
        "data": {"train_batch_size": 32},
    }
    (tmp_path / "own.yaml").write_text(
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 8}}\n"
    )
    assert convert(tmp_path / "own.yaml") == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings == {"defaults": ["ppo_trainer", "_self_"], "actor_rollout_ref": {"rollout": {"n": 8}}}


def test_commands_of_a_script() -> None:
    script = "A=1\nB=${A}2\nG=7 python -m x.y k=$B/$C 'q=${D:-d e}' \"$@\" # k=3\nexport E=5 F=6\n"
    (first, second) = commands_of(script + "python3 -u -m z f=$F$E > log")
    assert (first.module, first.launcher, first.words) == ("x.y", [], ["k=12/$C", "q=d e", "$@"])
    assert (second.module, second.words) == ("z", ["f=65"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "ls\n", "has no `python -m MODULE`; these commands are converted: recipe.dapo.main_dapo"),
        ("a.sh", "python -m verl.model_merger x=1\n", "has only verl.model_merger; these"),
        ("a.yaml", "a: [", "is not YAML: "),
        ("a.yaml", "- a\n", "it holds a list, not keys with values"),
        ("a.sh", b"\xff\xfe", "is not a text file"),
    ],
)
def test_bad_input_is_one_message(
    name: str, text: str | bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert convert(tmp_path / name) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path / name} ") and message in printed and printed.count("\n") == 1


def test_generation_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "python3 -m verl.trainer.main_generation model.path=m data.path=p.parquet data.n_samples=2 trainer.n_gpus_per_node=1\n"
    (tmp_path / "run.sh").write_text(script + "python3 -m verl.trainer.main_eval data.path=out.parquet\n")
    assert convert(tmp_path / "run.sh") == 0
    commands = re.sub(r"\\\n", " ", capsys.readouterr().out).splitlines()
    generate, evaluate = (shlex.split(line) for line in commands if line and not line.startswith("#"))
    assert generate[:2] == ["lockstep", "generate"] and "data.n_samples=2" in generate
    assert evaluate == ["lockstep", "eval", "data.path=out.parquet"]


@pytest.mark.parametrize(
    ("section", "program"), [("rollout: {temperature: 0.5}", "generate"), ("data: {response_key: answers}", "eval")]
)
def test_a_config_names_its_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, program: str
) -> None:
    (tmp_path / "c.yaml").write_text(f"{section}\n")
    convert(tmp_path / "c.yaml")
    assert capsys.readouterr().out.startswith(f"# lockstep {program} --config-name FILE")
