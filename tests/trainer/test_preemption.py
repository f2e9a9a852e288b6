"""SIGTERM with a grace period: which steps are finished, what is saved, and that the resumed run is the undisturbed one."""

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.engines.rollout.rollout_engine import RolloutEngine
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.run import preemption
from lockstep.trainer.run.interrupt import Interrupt
from lockstep.trainer.run.preemption import Patience
from lockstep.utils.state_file import load_state


def waits(patience: Patience, monkeypatch: pytest.MonkeyPatch, after_s: float) -> float:
    """How long the step may go on if SIGTERM comes `after_s` after its begin."""
    now = time.monotonic()
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    monkeypatch.setattr(preemption.threading.Timer, "start", lambda self: None)
    patience.step_begins()
    now += after_s
    patience.limit()
    return patience.wait_s()


TIMING = {"step": 100.0, "testing": 20.0, "gen": 50.0, "update_actor": 25.0, "update_weights": 5.0}


@pytest.mark.parametrize(
    ("grace_s", "after_s", "save_s", "expected"),
    [
        (100.0, 30.0, 10.0, 50.0),  # 50 s of the step are left and 10 of a save: within 90. 30 of them are the update's
        (60.0, 30.0, 10.0, 0.0),  # 60 are more than 54
        (60.0, 40.0, 10.0, 14.0),
        (60.0, 75.0, 10.0, 14.0),
        (10.0, 79.0, 9.5, 0.0),
    ],
)
def test_patience(
    grace_s: float, after_s: float, save_s: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = Patience(grace_s)
    patience.learn(TIMING | {"save_checkpoint": save_s})
    assert waits(patience, monkeypatch, after_s) == pytest.approx(expected)


def test_without_earlier_steps_there_is_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(Patience(100.0), monkeypatch, 0.0) == 0
    patience = Patience(100.0)  # half of it is for the first save
    patience.learn({"step": 30.0})
    assert waits(patience, monkeypatch, 0.0) == pytest.approx(40.0)
    patience.learn({"step": 30.0, "save_checkpoint": 1.0})
    patience.learn({"step": 30.0}, commit_s=9.0)  # in the background, after the step that began it
    assert waits(patience, monkeypatch, 0.0) == pytest.approx(80.0)


def test_a_second_sigterm_is_ignored_with_grace_and_ctrl_c_is_not() -> None:
    with Interrupt(grace_s=60.0) as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested and interrupt.is_preempted and interrupt.by == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def untimed(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "timing", "perf/"))} for row in rows]


def signalled(original: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The method, which gets SIGTERM at the begin of its call with this number."""
    calls = count(1)

    def method(*args: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # the handler runs here, and the timer of a grace without patience
        return original(*args)

    return method


def test_answers_of_a_discarded_step_are_not_in_the_checkpoint(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lengths of earlier answers decide which sequences start first: a resumed run goes on as an undisturbed one."""

    def lengths_after(name: str, steps: int, status: int) -> dict[str, Any]:
        settings = [f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", "trainer.val_before_train=false"]
        folder = tmp_path / name
        settings += [f"trainer.default_local_dir={folder}", "trainer.preemption_grace_s=0.01", "trainer.test_freq=-1"]
        assert main([*overrides, *settings]) == status
        state: dict[str, Any] = load_state(folder / "global_step_1" / "rollout" / "rank_0")["answer_lengths"]
        return state

    expected = lengths_after("one", 1, 0)
    generate, calls = RolloutEngine._run, count(1)

    def stopped_after_step_2(*args: Any) -> Any:
        completions = generate(*args)
        if next(calls) == 3:  # the first call is the engine's own check
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return completions

    monkeypatch.setattr(RolloutEngine, "_run", stopped_after_step_2)
    found = lengths_after("stopped", 3, 130)
    assert found["keys"] == expected["keys"]
    assert np.array_equal(found["counts"], expected["counts"]) and np.array_equal(found["means"], expected["means"])


@pytest.mark.slow
def test_stops_in_generation_in_the_update_and_in_validation(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three signals: step 2 is discarded in its generation, finished in its update, and saved without its validation."""
    settings = ["trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=2"]
    settings += ["trainer.val_before_train=false", "trainer.resume_mode=auto"]

    def run(name: str, *more: str) -> int:
        return main([*overrides, *settings, f"trainer.default_local_dir={tmp_path / name}", *more])

    assert run("undisturbed") == 0
    for phase, target, method, number, saved, lines in (
        ("generation", RolloutEngine, "_run", 3, 1, 1),  # the first call is the engine's own check
        (
            "update",
            PPOTrainer,
            "_update",
            2,
            2,
            1,
        ),  # no time for the validation either, so the step is logged on resume
        ("validation", PPOTrainer, "_validate_now", 1, 2, 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, method, signalled(getattr(target, method), number))
            assert run(phase, "trainer.preemption_grace_s=0.01") == 130
        assert [path.name for path in (tmp_path / phase).glob("global_step_*")] == [f"global_step_{saved}"], phase
        assert len(untimed(tmp_path / phase)) == lines
        assert json.loads((tmp_path / phase / "status.json").read_text())["state"] == "stopped"
        assert run(phase) == 0
        assert untimed(tmp_path / phase) == untimed(tmp_path / "undisturbed")
