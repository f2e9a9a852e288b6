"""`run_sft` with a program's config."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lockstep.config.errors import ConfigError
from lockstep.verl.trainer.sft_trainer import run_sft
from tests.tiny import save_tiny_model


def test_a_programs_config_is_trained(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(4)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = OmegaConf.create(
        {
            "model": {"path": str(tmp_path / "model")},
            "data": {"train_files": str(tmp_path / "train.jsonl"), "train_batch_size": 2, "max_length": 64},
            "optim": {"lr": 1e-3},
            "trainer": {"total_training_steps": 2, "device": "cpu", "default_local_dir": str(tmp_path / "run")},
        }
    )
    assert run_sft(config) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] > 0 for line in metrics] == [True, True]
    config.optim.lr = "fast"
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        run_sft(config)
