"""The commands of docs/export.md and those of `lockstep convert` run, in their order, on tiny checkpoints."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from tests.export.save_cases import verl_part, write_run
from tests.tiny import save_tiny_model

DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str, program: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(), flags=re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith(f"lockstep {program} ")]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    model = save_tiny_model(tmp_path / "model")
    step = write_run(tmp_path / "runs" / "first", str(model), model)  # global_step_3
    for part in ("actor", "critic"):
        verl = verl_part(tmp_path / "verl" / "global_step_5" / part, model)
        weights = load_file(model / "model.safetensors")
        if part == "critic":
            weights = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
            weights["score.weight"] = torch.randn(1, 32)
        torch.save(weights, verl / "model_world_size_1_rank_0.pt")
    (text,) = re.findall(
        r"```text\n(python3 -m verl.trainer.main_ppo.*?)```", (DOCS / "migrate_from_verl.md").read_text(), re.S
    )
    (tmp_path / "verl" / "run.sh").write_text(text)
    shutil.copy(Path(__file__).parents[1] / "config" / "verl_defaults.yaml", tmp_path / "verl" / "ppo.yaml")
    (tmp_path / "out").mkdir()
    return {
        "$RUN/first/global_step_100": str(step),
        "$RUN": str(tmp_path / "runs"),
        "$MODEL": str(model),
        "$OUT": str(tmp_path / "out"),
        "$VERL": str(tmp_path / "verl"),
    }


def run(command: str, places: dict[str, str]) -> int:
    for name, place in places.items():
        command = command.replace(name, place)
    return cli.main(shlex.split(command)[1:])


def test_export_page(places: dict[str, str]) -> None:
    lines = commands("export.md", "export")
    assert len(lines) == 4
    for line in lines:
        assert run(line, places) == 0, line
    out = Path(places["$OUT"])
    dtypes = {"model": torch.bfloat16, "last": torch.float32, "half": torch.float16}
    for name, dtype in dtypes.items():
        assert AutoModelForCausalLM.from_pretrained(out / name, dtype="auto").dtype == dtype
    assert (out / "critic" / "config.json").is_file()


def test_convert_commands(places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    actor, critic, script, config = commands("migrate_from_verl.md", "convert")
    out = Path(places["$OUT"])
    assert run(actor, places) == run(critic, places) == 0
    assert "score.weight" in load_file(out / "critic" / "model.safetensors")
    capsys.readouterr()
    assert run(script.partition(" >")[0], places) == 0
    printed = capsys.readouterr().out
    assert "actor_rollout_ref.rollout.name=vllm" in printed
    assert_page_command(re.sub(r"\\\n", " ", printed).splitlines()[-1])
    assert run(config, places) == 0
    assert yaml.safe_load((out / "ppo.yaml").read_text())["trainer"]["n_gpus_per_node"] == 8


def assert_page_command(converted: str) -> None:
    """The converted command has the settings of the one on the page but for the engine, and verl's number of GPUs."""
    converted += " actor_rollout_ref.rollout.name=embedded"
    (page,) = [line for line in commands("migrate_from_verl.md", "ppo") if "load_format" in line]
    got, expected = (load_config(PPOConfig, shlex.split(line)[2:], run_checks=False) for line in (converted, page))
    assert got.trainer.n_gpus_per_node == 8
    for section in ("data", "actor_rollout_ref", "algorithm", "critic"):
        assert getattr(got, section) == getattr(expected, section)
