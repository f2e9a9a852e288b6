"""Records a step: the batch on the controller, losses, gradients and weights on the workers.

step ─► `Recorder.updating`: the workers' engines record ─► update ─► `Recorder.updated`: batch and records ─► recording
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lockstep.engines.train import LossFn, MicroBatching, TrainEngine
from lockstep.protocol import DataProto
from lockstep.protocol.columns import Batch
from lockstep.protocol.keys import DERIVED
from lockstep.protocol.tokens import read, token_rows
from lockstep.single_controller import Dispatch, register
from lockstep.trainer.ppo import forks
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.replay.recording import STAGES, Digest, ModelRecord, Recording, Update, write_recording
from lockstep.trainer.run.observer import StepObserver
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from lockstep.utils.distributed import current_rank
from lockstep.utils.fingerprint import fingerprint
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.critic import CriticWorker


class RecordedEngine:
    """A training engine that also records its updates, between `begin` and `end`."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._updates: list[Update] | None = None
        self._losses: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin(self) -> None:
        self._updates = []

    def end(self) -> ModelRecord:
        assert self._updates is not None, "begin comes first"
        self._engine.onload(optimizer=True)
        record = ModelRecord(self._updates, _weights(self._engine))
        self._engine.offload()
        self._updates = None
        return record

    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        if self._updates is None:
            return self._engine.forward_backward(batch, loss_fn, micro, **options)
        self._losses, self._outputs = [], []

        def recorded(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = loss_fn(outputs, rows)
            self._losses.append(loss.detach().cpu())
            values = next((outputs[name] for name in ("log_probs", "values") if name in outputs), None)
            if values is not None:
                self._outputs.append(values.detach()[rows["response_mask"].bool()].float().cpu())
            return loss, metrics

        return self._engine.forward_backward(batch, recorded, micro, **options)

    def optimizer_step(self) -> float:
        if self._updates is not None:
            losses = [float(loss) for loss in self._losses]
            outputs = torch.cat(self._outputs) if self._outputs else torch.empty(0)
            self._updates.append(Update(losses, outputs, _gradients(self._engine)))
        return self._engine.optimizer_step()


def _gradients(engine: TrainEngine) -> dict[str, Digest]:
    """This rank's gradients by parameter; those of a compute copy are not handed to the masters yet."""
    model, compute = getattr(engine, "model", None), getattr(engine, "compute", None)
    if not isinstance(model, nn.Module):
        return {}
    computing = compute if isinstance(compute, nn.Module) else model
    name_of: Callable[[str], str] = getattr(model, "hf_name", str)
    found = {}
    for (name, master), parameter in zip(model.named_parameters(), computing.parameters()):
        gradient = master.grad if master.grad is not None else parameter.grad
        if gradient is not None:
            found[name_of(name)] = _digest(gradient)
    return found


def _weights(engine: TrainEngine) -> dict[str, Digest]:
    """This rank's trained weights; of an engine whose shards are not parameters of its model, whole."""
    model = getattr(engine, "model", None)
    named = list(model.named_parameters()) if isinstance(model, nn.Module) else []
    name_of: Callable[[str], str] = getattr(model, "hf_name", str)
    own = [(name_of(name), p) for name, p in named if p.requires_grad and p.numel() and not p.is_meta]
    return {name: _digest(weight) for name, weight in own or engine.weights(trained=True)}


def _digest(tensor: Tensor) -> Digest:
    local = cast(Tensor, tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return Digest(float(local.float().norm()), fingerprint(local))


class RecordedActor(ActorRolloutRefWorker):
    def _engine(self, role: Any) -> TrainEngine:
        return cast(TrainEngine, RecordedEngine(super()._engine(role)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_recording(self) -> None:
        cast(RecordedEngine, self.actor).begin()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_recording(self) -> ModelRecord:
        return cast(RecordedEngine, self.actor).end()


class RecordedCritic(CriticWorker):
    def _start(self, chat_template: str | None = None, **training: Any) -> None:
        super()._start(chat_template, **training)
        self.engine = cast(TrainEngine, RecordedEngine(self.engine))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_recording(self) -> None:
        cast(RecordedEngine, self.engine).begin()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_recording(self) -> ModelRecord:
        return cast(RecordedEngine, self.engine).end()


class PPORecorder(StepObserver):
    """Ends the run after `step`, which it records in `folder`."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder

    def started(self, trainer: PPOTrainer) -> None:
        trainer.total_training_steps = self.step  # after the schedules are built for all of the run's steps

    def updating(self, trainer: PPOTrainer, batch: DataProto) -> None:
        if trainer.global_steps == self.step:
            for group in self._groups(trainer).values():
                group.begin_recording()

    def updated(self, trainer: PPOTrainer, batch: DataProto) -> None:
        if trainer.global_steps != self.step:
            return
        models = {name: group.end_recording() for name, group in self._groups(trainer).items()}
        findings = trainer.audits.take_findings()
        trainer.audits.add(findings)
        names = [name for columns in STAGES.values() for name in columns if name not in DERIVED]
        columns = {name: read(batch.tensors, name) for name in names if name in batch.tensors}
        texts = [trainer.tokenizer.decode(row) for row in token_rows(batch.tensors, "responses")]
        is_agent = "__num_turns__" in batch.non_tensor_batch or forks.OWNER in batch.tensors
        write_recording(self.folder, Recording(self.step, columns, texts, models, findings, is_agent))

    def _groups(self, trainer: PPOTrainer) -> dict[str, Any]:
        """The groups that the step updates."""
        groups = {"critic": trainer.critic_wg} if trainer.use_critic else {}
        if self.step > trainer.critic_warmup:
            groups["actor"] = trainer.actor_rollout_wg
        return groups


class SupervisedRecorder(StepObserver):
    """The same for SFT, reward models and DPO."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder

    def started(self, trainer: SupervisedTrainer) -> None:
        trainer.total_training_steps = self.step
        trainer.engine = cast(TrainEngine, RecordedEngine(trainer.engine))

    def updating(self, trainer: SupervisedTrainer, batch: TensorDict) -> None:
        if trainer.global_steps == self.step:
            cast(RecordedEngine, trainer.engine).begin()

    def updated(self, trainer: SupervisedTrainer, batch: TensorDict) -> None:
        if trainer.global_steps != self.step:
            return
        record = cast(RecordedEngine, trainer.engine).end()
        if current_rank() == 0:
            names = [name for columns in STAGES.values() for name in columns if name in batch.keys()]  # noqa: SIM118
            columns = {name: batch[name] for name in names}
            write_recording(self.folder, Recording(self.step, columns, models={"model": [record]}))
