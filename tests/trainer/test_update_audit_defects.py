"""Defects of weights and optimizer, planted in real runs, are found in the step after them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.audit import AuditConfig, SupervisedAuditConfig
from lockstep.protocol import DataProto
from lockstep.trainer.fsdp_sft_trainer import main as sft
from lockstep.trainer.main_ppo import main as ppo
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.critic import CriticWorker

WARN = [f"trainer.audit.{name}=warn" for name in AuditConfig.__dataclass_fields__]


def fired(run: Path) -> dict[str, int]:
    """The first step in which each audit found something."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first: dict[str, int] = {}
    for step in steps:
        for name in step:
            if name.startswith("audit/"):
                first.setdefault(name.removeprefix("audit/"), step["step"])
    return first


def test_each_defect_is_found(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a healthy step: a critic whose step is skipped, a reference that is trained, a rollout with a copy of the weights."""
    num_updates = 0

    def plant(worker: type, method: str, change: Callable[[Any], None]) -> None:
        original = getattr(worker, method)

        def planted(self: Any, data: DataProto) -> DataProto:
            change(self)
            return original(self, data)  # type: ignore[no-any-return]

        vars(planted).update(vars(original))  # how it is dispatched
        monkeypatch.setattr(worker, method, planted)

    def in_the_actor(worker: Any) -> None:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 4:
            worker.rollout.runner.model = copy.deepcopy(worker.rollout.module)

    def in_the_critic(worker: Any) -> None:
        optimizer = worker.engine.optimizer
        if num_updates == 1:
            optimizer.step = lambda: None
        elif num_updates == 2:
            del optimizer.step

    def in_the_reference(worker: Any) -> None:
        if num_updates == 3:
            for tensor in worker.ref.frozen_tensors().values():
                tensor.mul_(1 + 1e-6)

    plant(ActorRolloutRefWorker, "update_actor", in_the_actor)
    plant(CriticWorker, "update_critic", in_the_critic)
    plant(ActorRolloutRefWorker, "compute_ref_log_prob", in_the_reference)
    settings = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"]
    assert ppo([*overrides, *settings, *WARN, "trainer.total_training_steps=5", "trainer.val_before_train=false"]) == 0
    found = fired(tmp_path / "run")
    assert {name: found[name] for name in ("optimizer_steps", "reference_policy", "weights")} == {
        "optimizer_steps": 2,
        "reference_policy": 4,
        "weights": 5,
    }
    assert not found.keys() & {"gradient", "micro_batch_split", "frozen_parameters", "finite"}


def test_a_frozen_tensor_that_sft_changes(
    tiny_run_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 8)
    command = [f"model.path={tiny_run_files}/model", f"data.train_files={tmp_path}/train.jsonl", "trainer.device=cpu"]
    command += ["data.train_batch_size=4", "data.max_length=32", f"trainer.default_local_dir={tmp_path}/run"]
    command += ["trainer.total_epochs=2", "model.lora_rank=4"]
    train_batch = SupervisedTrainer.train_batch

    def planted(self: Any, batch: Any) -> dict[str, Any]:
        if self.global_steps == 2:
            with torch.no_grad():
                for tensor in self.engine.frozen_tensors().values():
                    tensor.add_(1e-3)
        return train_batch(self, batch)

    monkeypatch.setattr(SupervisedTrainer, "train_batch", planted)
    assert SupervisedAuditConfig().frozen_parameters == "stop"
    assert sft(command) == 1
    error = capsys.readouterr().err
    assert "which is not trained" in error
    assert "(audit frozen_parameters; trainer.audit.frozen_parameters=warn goes on)" in error
