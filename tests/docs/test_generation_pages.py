"""The commands of generation.md and evaluation.md run one after another, on a tiny model and a few rows."""

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.trainer.main_ppo import main
from tests.tiny import save_tiny_model, small_run, write_rows

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ["max_prompt_length=40", "max_response_length=6", "trainer.device=cpu"]


def command_of(program: str) -> str:
    pages = [(DOCS / name).read_text() for name in ("generation.md", "evaluation.md")]
    (line,) = re.findall(rf"^lockstep {program} .*$", "\n".join(pages), flags=re.M)
    return line


def test_commands_run_in_the_order_of_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model(tmp_path / "model")
    for name in ("train", "val", "test"):
        write_rows(tmp_path / f"{name}.parquet", 4)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    more = [f"trainer.default_local_dir={tmp_path}/run", "trainer.total_training_steps=1"]
    assert main([*small_run(tmp_path), *more]) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "second")
    config = tmp_path / "second" / "global_step_1" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.002", 1))
    (tmp_path / "run" / "global_step_1").rename(tmp_path / "run" / "global_step_100")
    manifest = tmp_path / "run" / "global_step_100" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1,', '"step": 100,'))

    def arguments(program: str) -> list[str]:
        line = command_of(program)
        for name, place in {
            "$RUN/..": tmp_path,
            "$RUN": tmp_path / "run",
            "$DATA": tmp_path,
            "$OUT": tmp_path / "out",
        }.items():
            line = line.replace(name, str(place))
        return shlex.split(line)[1:]

    assert cli.main([*arguments("generate"), *SMALL]) == 0
    assert cli.main(arguments("eval")) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_prompts"] == {"openai/gsm8k": 4}
    assert (tmp_path / "out" / "scores.jsonl").read_text().count("\n") == 16
    capsys.readouterr()
    assert cli.main(arguments("compare")) == 0
    assert "actor_rollout_ref.actor.optim.lr" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n"))
    assert cli.main([*arguments("chat"), "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out
