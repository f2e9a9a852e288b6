"""Benchmarks of the controller, at a small scale: they run, and what they compare is equal."""

import json
import re
import runpy
from pathlib import Path

import pytest

from lockstep.demo.model import make_model_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.usefixtures("no_registrations")
def test_no_conversation_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Many conversations at once through the embedded engine; tools that hang, raise or return bytes cost only their own."""
    main = runpy.run_path(str(BENCHMARKS / "conversations.py"))["main"]
    assert main(["--conversations", "200"]) == 0
    found = dict(re.findall(r"(\w+) ([\d.e+]+)", capsys.readouterr().out.splitlines()[-1]))
    assert (found["conversations"], found["lost"], found["wrong"]) == ("200", "0", "0")
    assert float(found["sampled_tokens"]) > 200 * 5


def test_requests_of_both_modes_give_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model_folder(tmp_path, seed=1)
    arguments = f"--model {tmp_path} --prompts 2 --samples 2 --new-tokens 4 --reward-ms 1 --rounds 1"
    monkeypatch.setattr("sys.argv", ["async_rollout.py", *arguments.split()])
    assert runpy.run_path(str(BENCHMARKS / "async_rollout.py"))["main"]() == 0
    assert re.search(r"4 responses of .*\nsync   median .*\nasync  median ", capsys.readouterr().out)


@pytest.mark.slow
def test_replay_leaves_no_gap_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(BENCHMARKS / "router_replay.py"))["main"]
    assert main(["--layers", "2", "--experts", "8", "--top-k", "2", "--prompts", "4", "--tokens", "8"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rollout ")]
    found = [dict(re.findall(r"(\w+) ([\w.+-]+)", line)) for line in lines]
    assert [(row["rollout"], row["trainer"]) for row in found] == [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
    ]
    assert float(found[0]["replayed"]) < 1e-5


@pytest.mark.slow
def test_the_dashboard_on_a_made_run(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason='needs plotly: pip install "lockstep-rl[dashboard]"')
    main = runpy.run_path(str(BENCHMARKS / "dashboard.py"))["main"]
    arguments = ["--steps", "20", "--prompts", "4", "--samples", "2", "--json", str(tmp_path / "seconds.json")]
    assert main([*arguments, "--folder", str(tmp_path / "large_run")]) == 0
    spent = json.loads((tmp_path / "seconds.json").read_text())
    assert {
        "start",
        "page, cold",
        "rollouts of a step",
        "prompt, indexed",
        "search, first answer",
        "export",
    } <= spent.keys()
