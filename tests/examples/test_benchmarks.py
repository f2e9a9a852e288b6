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


def test_speeds_of_model_families(tmp_path: Path) -> None:
    """The script runs and replaces the rows of what it measured; docs/models.md has a row per family."""
    script = runpy.run_path(str(BENCHMARKS / "model_families.py"))
    page = (BENCHMARKS.parent / "docs" / "models.md").read_text()
    copy, results = tmp_path / "models.md", tmp_path / "results.json"
    copy.write_text(page.replace("| Mamba 2 | mamba2 |", "| stale | mamba2 |"))
    sizes = ["--rows", "2", "--new-tokens", "2", "--repeats", "1"]
    assert script["main"]([*sizes, "--types", "llama", "mamba2", "--json", str(results), "--table", str(copy)]) == 0
    assert [(found["family"], found["training"], found["rollout"]) for found in json.loads(results.read_text())] == [
        ("Llama", "ours", "embedded"),
        ("Mamba 2", "transformers", "embedded"),
    ]
    for text in (page, copy.read_text()):
        table = text.partition("<!-- families -->\n")[2].partition("<!-- end -->")[0]
        cells = [line.strip("| ").split(" | ") for line in table.splitlines()[3:-1]]
        assert [row[:2] for row in cells] == [[family, name] for name, family in script["FAMILIES"].items()]
        assert all(len(row) == 8 for row in cells)
    assert copy.read_text().partition("<!-- end -->")[2] == page.partition("<!-- end -->")[2]
