"""The command that docs/migrate_from_trl.md turns a TRL script into trains, and its keys exist."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import keys
from lockstep.trainer.main_ppo import main
from tests.tiny import save_tiny_model, write_rows

PAGE = (Path(__file__).parents[2] / "docs" / "migrate_from_trl.md").read_text()


def test_the_command_for_a_trl_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.parquet", 8)
    (reward,) = re.findall(r"```python\n(# digits.py\n.*?)```", PAGE, flags=re.S)
    (tmp_path / "digits.py").write_text(reward)
    (command,) = re.findall(r"```shell\n(.*?)```", PAGE, flags=re.S)
    program, verb, *settings = shlex.split(command.replace("$MODEL", str(tmp_path / "model")))
    assert (program, verb) == ("lockstep", "ppo")
    assert main([*settings, "trainer.device=cpu", "data.max_response_length=8", "data.max_prompt_length=40"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2 and rows[-1]["actor/kl_loss"] >= 0
    assert (tmp_path / "runs" / "digits" / "global_step_2" / "actor" / "huggingface").is_dir()


def test_every_key_of_the_table_exists() -> None:
    table = PAGE[PAGE.index("## Settings") : PAGE.index("## Classes")]
    known = {name.rpartition(".")[2] for name in keys(PPOConfig)}
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `")]
    named = [re.split(r"[ =]", text)[0] for cell in cells for text in re.findall(r"`([\w.=]+)", cell)]
    leaves = {name.rpartition(".")[2] for name in named if "-" not in name and name not in ("seq", "token")}
    assert len(leaves) > 30 and not leaves - known
