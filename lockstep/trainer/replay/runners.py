"""The parts of a replay that need torch: the run of its folder, and how trainers become those of a replay."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.placement import Pools
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.data.fingerprint import changes
from lockstep.data.loader import StatefulLoader
from lockstep.protocol import DataProto
from lockstep.single_controller import Role, Worker
from lockstep.trainer.ppo import forks
from lockstep.trainer.ppo.batch_dump import read_dump
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.rollout_sources.rollout_source import RolloutSource
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.trainer.replay.recorder import PPORecorder, RecordedActor, RecordedCritic, SupervisedRecorder
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
    data_from:   a checkpoint of the run: its data must be the same.
    """

    step: int
    folder: Path
    save_before: bool = False
    batch: Path | None = None
    data_from: Path | None = None

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
    """Also gives the step the batch of a dump."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.step, task.folder)
        self.task = task

    def started(self, trainer: PPOTrainer) -> None:
        super().started(trainer)
        self.task.check_data(trainer.train_dataloader)
        if self.task.batch is not None:
            trainer.source = DumpedBatch(trainer.source, self.step, self.task.batch)


class DumpedBatch(RolloutSource):
    """The samples of a run's own source, but in one step those of a dump."""

    SAMPLED = (
        *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
        *("policy_version", "policy_versions", "sampling_seed", "rollout_log_probs", "routed_experts"),
        *("rm_scores", "token_level_scores", "reward_baselines", forks.OWNER),
    )
    """Columns that a source gives; those of later stages are computed again."""

    def __init__(self, source: RolloutSource, step: int, dump: Path) -> None:
        super().__init__(source.weight_sync)
        self.source = source
        self.step = step
        self.dump = dump
        self.keeps_prompts = source.keeps_prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        if step != self.step:
            return self.source.collect(prompts, step=step, timing=timing)
        batch = read_dump(self.dump).batch
        return batch.select([name for name in self.SAMPLED if name in batch.tensors]), {}

    def update_weights(self, policy_version: int) -> dict[str, float]:
        return self.source.update_weights(policy_version)

    def idle(self) -> Any:
        return self.source.idle()

    def close(self) -> None:
        self.source.close()


def make_replay(trainer: SupervisedTrainer, task: Task) -> None:
    """Make a trainer the one of a replay."""
    task.check_data(trainer.loader)
    trainer.run = ReplayedRun(trainer.config, task, trainer.total_training_steps)
    trainer.observer = SupervisedRecorder(task.step, task.folder)
