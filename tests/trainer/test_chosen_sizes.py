"""Runs that set no sizes: on a small dataset, and with micro-batches that are chosen from the device's memory."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.plan import token_budgets
from lockstep.trainer import fsdp_sft_trainer
from lockstep.trainer.main_ppo import main

GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.optim.lr=1e-3"]
STEPS = ["trainer.total_training_steps=2", "trainer.val_before_train=false"]


@pytest.fixture
def unsized(overrides: list[str]) -> list[str]:
    """A small run without sizes; its dataset has 16 rows."""
    return [word for word in overrides if "batch_size" not in word] + GRPO + STEPS


def test_nothing_is_set(unsized: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert main([*unsized, "trainer.device=auto"]) == 0
    text = "\n".join(caplog.messages)
    assert "the dataset has 16 rows, fewer than a step takes by default (data.train_batch_size=1024)" in text
    assert "grpo: 16 prompts x 2 samples per step" in text
    assert "tokens per micro-batch chosen for" in text
    assert "no GPU is visible: training on CPU, in 1 process" in text
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    actor = saved["actor_rollout_ref"]["actor"]
    assert saved["data"]["train_batch_size"] == actor["ppo_mini_batch_size"] == 16
    assert actor["use_dynamic_bsz"] is True and actor["ppo_max_token_len_per_gpu"] in token_budgets.BUDGETS
    caplog.clear()
    longer = [*unsized, "trainer.device=auto", "trainer.total_training_steps=3", "trainer.total_epochs=4"]
    assert main(longer) == 0  # resumes
    changed = [message for message in caplog.messages if message.startswith("changed since the checkpoint")]
    assert changed and not any("batch" in message or "token" in message for message in changed)


def test_result_does_not_depend_on_the_choice(
    unsized: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(name: str) -> list[Any]:
        folder = tmp_path / name
        assert main([*unsized, f"trainer.default_local_dir={folder}"]) == 0
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(row["actor/pg_loss"], row["actor/grad_norm"]) for row in rows]

    one = losses("one")
    monkeypatch.setattr(token_budgets, "BUDGETS", (64,))
    assert [value for row in losses("many") for value in row] == pytest.approx(
        [value for row in one for value in row], abs=2e-5
    )


def test_supervised_training(tiny_run_files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(6 * '{"question": "1+1?", "answer": "2"}\n')
    settings = [f"model.path={tiny_run_files}/model", f"data.train_files={rows}", "trainer.total_epochs=1"]
    assert fsdp_sft_trainer.main([*settings, f"trainer.default_local_dir={tmp_path}/run"]) == 0
    text = "\n".join(caplog.messages)
    assert "the dataset has 6 rows, fewer than a step takes by default (data.train_batch_size=256)" in text
    assert "tokens per micro-batch chosen for" in text and "data.max_token_len_per_gpu=" in text
    assert "no GPU is visible: training on CPU" in text
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["data"]["train_batch_size"] == 6 and saved["data"]["use_dynamic_bsz"] is True


def test_a_batch_that_the_user_has_set_is_kept(unsized: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*unsized, "data.train_batch_size=32"]) == 2
    assert "data.train_batch_size=32, but the dataset has only 16 rows" in capsys.readouterr().err
