"""`lockstep compare`: settings that differ, and results."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import cli
from lockstep.observability.compare import different_settings, read_config, results
from lockstep.observability.curves import read_runs

CORE = "val-core/openai/gsm8k/acc/mean@1"


def write_run(folder: Path, settings: dict[str, Any], steps: list[dict[str, float]]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    lines = [json.dumps({"step": number, **step}) for number, step in enumerate(steps, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    def settings(lr: float, n: int, name: str) -> dict[str, Any]:
        policy = {"rollout": {"n": n}, "actor": {"grad_clip": n, "optim": {"lr": lr, "clip_grad": n}}}
        return {"actor_rollout_ref": policy, "trainer": {"experiment_name": name, "seed": 1}}

    first = [{CORE: 0.5, "timing_s/step": 9.0}, {CORE: 0.7, "timing_s/step": 2.0}, {CORE: 0.6, "timing_s/step": 2.0}]
    second = [{"critic/score/mean": 0.1, "perf/max_memory_allocated_gb": 3.0}]
    return [
        write_run(tmp_path / "a", settings(1e-6, 4, "a"), first),
        write_run(tmp_path / "b", settings(1e-5, 8, "b"), second),
    ]


def test_settings_and_results(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = dict(results(read_runs(runs)))
    assert found["steps"] == ["3", "1"]
    assert found["openai/gsm8k/acc/mean@1, last"] == ["0.6", "-"]
    assert found["openai/gsm8k/acc/mean@1, best"] == ["0.7 (step 2)", "-"]
    assert found["seconds per step"] == ["2", "-"] and found["GPU memory, GiB"] == ["-", "3"]
    assert cli.main(["compare", *map(str, runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["setting", "a", "b"]
    assert [line.split() for line in lines[1:4]] == [
        ["actor_rollout_ref.rollout.n", "4", "8"],
        ["actor_rollout_ref.actor.optim.lr", "1e-06", "1e-05"],
        ["actor_rollout_ref.actor.optim.clip_grad", "4", "8"],  # actor.grad_clip follows it
    ]
    assert not any("experiment_name" in line or "seed" in line for line in lines)


def test_a_key_that_one_run_lacks() -> None:
    assert list(different_settings([{"a": None}, {"a": None, "b": True}])) == [("b", ["-", "true"])]


def test_runs_of_different_programs(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model": {f"setting_{number}": number for number in range(30)}, "trainer": {"seed": 2}}
    reward_model = write_run(tmp_path / "rm", settings, [{"val/loss": 0.5, "val/accuracy": 0.75}])
    assert cli.main(["compare", str(runs[0]), str(reward_model)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        ["setting", "a", "rm"],
        ["trainer.seed", "1", "2"],
        ["35", "settings", "that", "not", "all", "of", "the", "runs", "have", "are", "left", "out"],
    ]
    assert ["accuracy,", "last", "-", "0.75"] in lines


def test_bad_arguments(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(runs[0])]) == 2
    assert cli.main(["compare", str(runs[0]), str(tmp_path / "none")]) == 2
    (runs[1] / "config.yaml").unlink()
    assert cli.main(["compare", *map(str, runs)]) == 2
    error = capsys.readouterr().err
    assert error.count("lockstep compare: ") == 3 and "config.yaml cannot be read: No such file" in error


def test_settings_are_those_of_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that trained nothing has no part in the results."""
    runs = [write_run(tmp_path / name, {"trainer": {"seed": 5}}, [{"critic/score/mean": 0.5}] * 2) for name in "ab"]
    (runs[0] / "configs").mkdir()
    for name, seed in (("001_step_0", 1), ("002_step_1", 2), ("003_step_2", 3)):
        (runs[0] / "configs" / f"{name}.yaml").write_text(yaml.safe_dump({"trainer": {"seed": seed}}))
    assert cli.main(["compare", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["trainer.seed", "2", "5"]
    (runs[0] / "global_step_2").mkdir()
    (runs[0] / "global_step_2/config.yaml").write_text(yaml.safe_dump({"trainer": {"seed": 4}}))
    assert cli.main(["compare", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["trainer.seed", "4", "5"]


@pytest.mark.parametrize("text", ["a: &a {b: *a}", "a: &a [1, *a]"])
def test_a_config_that_is_inside_itself(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read: Circular reference"):
        read_config(tmp_path / "config.yaml")
