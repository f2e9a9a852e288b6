"""Benchmarks of the controller, at a small scale: they run, and what they compare is equal."""

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
