"""`lockstep doctor --engine`: what it proves, and what it says if the proof fails."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from tests.tiny import save_tiny_model

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])
STEPS = ["start", "weights", "training step", "new weights"]


def doctor(engine: str, *more: str) -> int:
    return cli.main(["doctor", "--engine", engine, *more, "trainer.device=cpu"])


@pytest.mark.parametrize("engine", ["embedded", VLLM])
def test_proves_the_weights(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(engine) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"engine {engine} on cpu; model small, random weights\nlockstep ")
    lines = [line for line in text.splitlines() if line.startswith("ok")]
    assert [line[8:22].strip() for line in lines] == STEPS
    assert "26 tensors" in lines[1] and "learning rate 0: no weight changed" in lines[2]
    assert "no cached prefix is stale" in lines[3]


def test_the_documented_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "rollout.md").read_text()
    commands = re.findall(r"^lockstep (doctor --engine .*)$", page, re.M)
    assert len(commands) == 2
    (command,) = [command for command in commands if "$MODEL" in command]  # the other one is tested above
    model = str(save_tiny_model(tmp_path / "model"))
    assert cli.main([*command.replace("$MODEL", model).split(), "trainer.device=cpu"]) == 0
    assert f"engine hf on cpu; model {model}" in capsys.readouterr().out


def test_a_tensor_that_does_not_arrive(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    update = EmbeddedEngine.update_weights

    def drop(self: EmbeddedEngine, weights: Iterator[Any]) -> None:
        update(self, (w for w in weights if self.policy_version < 1 or w[0] != "model.norm.weight"))

    monkeypatch.setattr(EmbeddedEngine, "update_weights", drop)
    assert doctor("embedded") == 1
    text = capsys.readouterr().out
    assert "ok      training step" in text
    assert "FAILED  new weights     the rollout's weights differ from the actor's after update 2" in text


def test_wrong_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("embeded") == 2
    assert "actor_rollout_ref.rollout.name" in capsys.readouterr().err
    assert doctor("embedded", "actor_rollout_ref.rollout.max_num_seq=3") == 2
    assert doctor("embedded", "--model", "/no/such/model") == 2
    with pytest.raises(SystemExit):
        doctor("embedded", "--fast")
