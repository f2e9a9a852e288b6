"""Training with drafts from history: the same responses as without, also after a restart from a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.engines.rollout.embedded.draft_controller import Acceptance, DraftController
from lockstep.observability.glossary import explain
from lockstep.trainer.main_ppo import main

DRAFTS = "actor_rollout_ref.rollout.history_drafts"


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice does not depend on times."""
    monkeypatch.setattr(DraftController, "is_open", lambda self, num_rows: True)
    monkeypatch.setattr(DraftController, "may_pay", lambda self, rows, num_rows: True)

    def lengths(self: DraftController, rows: Sequence[Acceptance], available: Sequence[int]) -> list[int]:
        return list(available)

    monkeypatch.setattr(DraftController, "lengths", lengths)
    monkeypatch.setattr(DraftController, "saved_seconds", lambda self, num_rows, num_sampled, seconds: 0.0)


def run(overrides: list[str], folder: Path, *extra: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of the steps, and all responses with their scores."""
    command = [
        *overrides,
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=8",
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=0.05",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={folder}",
        f"trainer.rollout_data_dir={folder}/rollouts",
        *extra,
    ]
    assert main(command) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    texts = (file.read_text().rstrip("\n").split("\n") for file in files)  # responses may have other line separators
    return rows, [json.loads(line) for text in texts for line in text]


@pytest.mark.slow
@pytest.mark.usefixtures("always_drafts")
def test_training_gives_the_same_responses(overrides: list[str], tmp_path: Path) -> None:
    _, expected = run(overrides, tmp_path / "plain", "trainer.save_freq=0")
    rows, got = run(overrides, tmp_path / "drafts", f"{DRAFTS}.enable=true", "trainer.save_freq=2")
    assert len(got) == 4 * 16
    keys = ("input", "output", "score")
    assert [[row[key] for key in keys] for row in got] == [[row[key] for key in keys] for row in expected]
    assert rows[2]["perf/drafts/share"] > 0.2  # the second epoch
    assert rows[2]["perf/drafts/tokens_per_step"] > 1
    names = {name for row in rows for name in row if name.startswith("perf/drafts/")}
    assert len(names) == 5 and all(explain(name) for name in names)
    # from the checkpoint after the first epoch on
    resume = f"trainer.resume_from_path={tmp_path}/drafts/global_step_2"
    modes = ("trainer.resume_mode=resume_path", resume, f"{DRAFTS}.enable=true", "trainer.save_freq=0")
    resumed, rest = run(overrides, tmp_path / "resumed", *modes)
    assert [[row[key] for key in keys] for row in rest] == [[row[key] for key in keys] for row in got[2 * 16 :]]
    [third] = [row for row in resumed if row["step"] == 3]
    for name in ("acceptance", "share", "tokens_per_step"):
        assert third[f"perf/drafts/{name}"] == rows[2][f"perf/drafts/{name}"]
    # a checkpoint with history is resumed without drafts, too
    assert run(overrides, tmp_path / "off", *modes[:2], "trainer.save_freq=0")[1] == rest
