"""The parts of a replay that need torch: the run of its folder, and how trainers become those of a replay."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config.placement import Pools
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.data.fingerprint import changes
from lockstep.data.loader import StatefulLoader
from lockstep.single_controller import Role, Worker
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.trainer.replay.recorder import PPORecorder, RecordedActor, RecordedCritic, SupervisedRecorder
from lockstep.trainer.replay.source_run import JournalPart
from lockstep.trainer.replay.sources import DumpedBatch, JournalSamples
from lockstep.trainer.run.training_run import LOADER_STATE, TrainingRun
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from lockstep.utils.state_file import load_state
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.critic import CriticWorker

RECORDED: dict[type[Worker], type[Worker]] = {ActorRolloutRefWorker: RecordedActor, CriticWorker: RecordedCritic}


@dataclass(frozen=True)
class Task:
    """A replay.

    folder:      what it writes to.
    save_before: also save a checkpoint of the step before `step`.
    batch:       the folder of a dump, whose batch the step trains on instead of its samples.
    journal:     what has the samples of the steps; None generates them.
    data_from:   a checkpoint of the run: its data must be the same.
    """

    step: int
    folder: Path
    save_before: bool = False
    batch: Path | None = None
    data_from: Path | None = None
    journal: JournalPart | None = None

    def check_data(self, loader: StatefulLoader) -> None:
        """ValueError if the rows are not those of the run."""
        saved = {} if self.data_from is None else load_state(self.data_from / LOADER_STATE).get("content", {})
        now = loader.state_dict().get("content", {})
        if saved and now and (found := changes(saved, now)):
            raise ValueError(
                f"the data of the run has changed since: {'; '.join(found)}. Bring back the files that it read"
            )


class ReplayedRun(TrainingRun):
    """The run of a replay: it reports no changed settings, validates at the recorded step only, and saves only what `Task` says."""

    def __init__(self, config: PPOConfig | SupervisedConfig, task: Task, num_steps: int) -> None:
        super().__init__(config)
        self.task = task
        self.num_steps = num_steps

    def claim(self, resume_from: Path | None = None) -> tuple[int, Path] | None:
        self.lock()
        found = self.checkpoints.find(self.config.trainer.resume_mode, self.config.trainer.resume_from_path)
        self.last_checkpoint = None if found is None else found[1]
        return found

    def must_test(self, step: int, num_steps: int) -> bool:
        return step == self.task.step and super().must_test(step, self.num_steps)

    def must_save(self, step: int, num_steps: int) -> bool:
        return self.task.save_before and step == self.task.step - 1


class ReplayRunner(TaskRunner):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def _add(self, role: Role, worker: type[Worker], pools: Pools) -> None:
        recorded = worker if role == Role.RefPolicy else RECORDED.get(worker, worker)
        super()._add(role, recorded, pools)

    def build(self, config: PPOConfig) -> PPOTrainer:
        trainer = super().build(config)
        trainer.run = ReplayedRun(trainer.config, self.task, trainer.total_training_steps)
        trainer.observer = Recorder(self.task)
        return trainer


class Recorder(PPORecorder):
    """Also gives steps the samples of a journal, or of a dump."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.step, task.folder)
        self.task = task

    def started(self, trainer: PPOTrainer) -> None:
        super().started(trainer)
        self.task.check_data(trainer.train_dataloader)
        trainer.audit.keeps_batches = False  # the folder is deleted
        if self.task.journal is not None:
            trainer.source.close()
            trainer.audits.levels["data_order"] = "off"  # no prompts are drawn
            num_samples = trainer.config.actor_rollout_ref.rollout.n
            trainer.source = JournalSamples(self.task.journal, num_samples, trainer.weight_sync, trainer.num_updates)
        if self.task.batch is not None:
            draws = self.task.journal is None and trainer.config.trainer.async_mode is None
            draws &= not trainer.audit.prompts.may_drop
            trainer.source = DumpedBatch(trainer.source, self.step, self.task.batch, draws=draws)
            if not draws:
                trainer.audits.levels["data_order"] = "off"


def make_replay(trainer: SupervisedTrainer, task: Task) -> None:
    """Make a trainer the one of a replay."""
    task.check_data(trainer.loader)
    trainer.run = ReplayedRun(trainer.config, task, trainer.total_training_steps)
    trainer.observer = SupervisedRecorder(task.step, task.folder)
