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


class UpdateRecorder:
    """Records the updates of a training engine from now on, by methods in the place of the engine's. For the last step of a run."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._updates: list[Update] = []
        self._losses: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._forward_backward = engine.forward_backward
        self._optimizer_step = engine.optimizer_step
        engine.forward_backward = self.forward_backward  # type: ignore[method-assign]
        engine.optimizer_step = self.optimizer_step  # type: ignore[method-assign]

    def end(self) -> ModelRecord:
        self._engine.onload(optimizer=True)
        record = ModelRecord(self._updates, _weights(self._engine))
        self._engine.offload()
        return record

    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        return self._forward_backward(batch, _RecordedLoss(loss_fn, self), micro, **options)

    def clear(self) -> None:
        """A mini-batch begins."""
        self._losses, self._outputs = [], []

    def add(self, loss: Tensor, outputs: Tensor) -> None:
        """Those of a micro-batch."""
        self._losses.append(loss)
        self._outputs.append(outputs)

    def optimizer_step(self) -> float:
        losses = [float(loss) for loss in self._losses]
        outputs = torch.cat(self._outputs) if self._outputs else torch.empty(0)
        self._updates.append(Update(losses, outputs, _gradients(self._engine)))
        return self._optimizer_step()


class _RecordedLoss:
    """A loss function whose results are recorded."""

    def __init__(self, loss_fn: LossFn, recorder: UpdateRecorder) -> None:
        self._loss_fn = loss_fn
        self._recorder = recorder
        recorder.clear()

    def __call__(self, outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self._loss_fn(outputs, rows)
        values = next((outputs[name] for name in ("log_probs", "values") if name in outputs), torch.empty(0, 0))
        if values.numel():
            values = values.detach()[rows["response_mask"].bool()]
        self._recorder.add(loss.detach().cpu(), values.float().flatten().cpu())
        return loss, metrics

    def restart(self) -> None:
        """The mini-batch is computed again, in smaller micro-batches."""
        self._recorder.clear()
        getattr(self._loss_fn, "restart", lambda: None)()


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
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_recording(self) -> None:
        self.recorder = UpdateRecorder(self.actor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_recording(self) -> ModelRecord:
        return self.recorder.end()


class RecordedCritic(CriticWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_recording(self) -> None:
        self.recorder = UpdateRecorder(self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_recording(self) -> ModelRecord:
        return self.recorder.end()


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
        texts = [str(trainer.tokenizer.decode(row)) for row in token_rows(batch.tensors, "responses")]
        is_agent = "__num_turns__" in batch.non_tensor_batch or forks.OWNER in batch.tensors
        rollout = trainer.config.actor_rollout_ref.rollout
        rollout_rounds = is_agent or (rollout.history_drafts.enable and not rollout.exact)
        write_recording(self.folder, Recording(self.step, columns, texts, models, findings, rollout_rounds))

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

    def updating(self, trainer: SupervisedTrainer, batch: TensorDict) -> None:
        if trainer.global_steps == self.step:
            self.recorder = UpdateRecorder(trainer.engine)

    def updated(self, trainer: SupervisedTrainer, batch: TensorDict) -> None:
        if trainer.global_steps != self.step:
            return
        record = self.recorder.end()
        if current_rank() == 0:
            names = [name for columns in STAGES.values() for name in columns if name in batch.keys()]  # noqa: SIM118
            columns = {name: batch[name] for name in names}
            write_recording(self.folder, Recording(self.step, columns, models={"model": [record]}))
