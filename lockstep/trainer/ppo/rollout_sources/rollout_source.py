"""Where a training step gets its samples from: the interface, and what asynchronous sources share."""

import functools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.tokens import entries, read, row_chunks
from lockstep.trainer.ppo.async_sampling import AsyncSampling
from lockstep.trainer.ppo.rollout_repair import RolloutRepair
from lockstep.trainer.ppo.rollout_sources.background import BackgroundRollout
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group, GroupSchedule
from lockstep.trainer.ppo.rollout_sources.journal import Journal
from lockstep.trainer.ppo.sampling import concat_scored
from lockstep.utils import heartbeat, step_stop
from lockstep.utils.progress import phase
from lockstep.utils.state_file import has_state, load_state, save_state
from lockstep.utils.timing import marked_timer
from lockstep.weight_sync import WeightSync
from lockstep.workers.rollout_client import REPAIRABLE

T = TypeVar("T")
STATE = "rollouts"
"""File of a checkpoint: groups that were drawn from the data and not trained on."""


QUEUES = ("waiting", "running", "finished")
"""Lists of a `GroupSchedule`, whose lengths are in the watchdog's reports."""


class RolloutSource(ABC):
    """keeps_prompts: prompts that a discarded step has drawn are still there for the next one."""

    keeps_prompts = False
    repair: RolloutRepair | None = None
    """Set by the trainer."""
    policy_version = 0
    """Of the weights that the rollout has, or is to get."""

    def __init__(self, weight_sync: WeightSync | None) -> None:
        self.weight_sync = weight_sync

    def start(self, run_dir: Path, step: int, policy_version: int, checkpoint: Path | None) -> None:
        """Begin after `step`, with weights of `policy_version`; checkpoint: the folder that the run goes on from."""
        self.policy_version = policy_version

    def repairing(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is called again after a failure of the rollout that was repaired."""
        while True:
            try:
                return call()
            except REPAIRABLE as error:
                if self.repair is None:
                    raise
                with step_stop.shielded():
                    self._repair(error, self.repair)

    def _repair(self, error: Exception, repair: RolloutRepair) -> None:
        repair.repair(error, self.policy_version)

    @abstractmethod
    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        """The scored samples that the step trains on, and metrics."""

    def update_weights(self, policy_version: int) -> dict[str, float]:
        """The actor has been updated: bring its weights to the rollout; returns metrics."""
        self.policy_version = policy_version
        return self.repairing(self._send)

    def _send(self) -> dict[str, float]:
        with step_stop.shielded():  # both ends of the transfer must come to its end
            return {} if self.weight_sync is None else self.weight_sync.run(self.policy_version)

    def idle(self) -> AbstractContextManager[None]:
        """Inside, the rollout has the actor's weights and generates nothing: others may use it."""
        return nullcontext()

    def pending(self) -> list[DataProto]:
        """Prompts that were drawn and that no step has trained on yet."""
        return []

    @property
    def num_dropped(self) -> int:
        """Prompts that were dropped on purpose since the start."""
        return 0

    def save(self, folder: Path) -> None:  # noqa: B027
        """Write the state into the folder of a checkpoint."""

    def saved(self, step: int) -> None:  # noqa: B027
        """The checkpoint of the step is complete."""

    def close(self) -> None:  # noqa: B027
        """Stop generating."""


class AsyncSource(RolloutSource):
    """Groups of samples that are generated in the background.

    last_step: of the run.
    """

    keeps_prompts = True
    ahead: int | None = None
    """See `GroupSchedule`."""

    def __init__(
        self, config: PPOConfig, sampling: AsyncSampling, weight_sync: WeightSync | None, last_step: int
    ) -> None:
        super().__init__(weight_sync)
        self.config = config
        self.sampling = sampling
        trainer = config.trainer
        self.schedule = GroupSchedule(
            config.data.train_batch_size, trainer.max_staleness, trainer.stale_samples, self.ahead, last_step
        )
        self.num_drawn = 0
        """Batches of prompts drawn from the data."""
        self.sync_metrics: dict[str, float] = {}
        """Metrics of weight updates that `collect` has not reported."""
        self.is_updated = False
        """Whether the actor has been updated since weights were sent, for sources that send them within `collect`."""
        self.rollout: BackgroundRollout | None = None

    def start(self, run_dir: Path, step: int, policy_version: int, checkpoint: Path | None) -> None:
        super().start(run_dir, step, policy_version, checkpoint)
        self.num_drawn = step
        self.journal = Journal(run_dir, step, policy_version)
        if checkpoint is not None and has_state(checkpoint / STATE):
            state = load_state(checkpoint / STATE)
            self.num_drawn = state["num_drawn"]
            self.sync_metrics = state.get("sync_metrics", {})
            self.is_updated = state.get("is_updated", False)
            num_samples = self.config.actor_rollout_ref.rollout.n
            self.schedule.restore([group_of_state(group, num_samples) for group in state["groups"]], step + 1)
        self.rollout = BackgroundRollout(self.sampling.sampler, self.schedule, self.journal, self.sampling.filter.keeps)
        self._last_collect = time.perf_counter()
        for name in QUEUES:
            heartbeat.set_gauge(f"{name} groups", functools.partial(_length, self.schedule, name))

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        began = time.perf_counter()
        dropped = dict(self._rollout.num_dropped)
        with marked_timer("gen", timing), phase("generate"):
            groups = self.repairing(lambda: self._take(prompts, step))
        self.journal.train(step, groups)
        batch = batch_of_groups(groups, step)
        now = time.perf_counter()
        elapsed_s = now - self._last_collect
        self._last_collect = now
        metrics: dict[str, float] = {
            f"async/{name}_groups": n - dropped[name] for name, n in self._rollout.num_dropped.items()
        }
        metrics["async/trainer_wait_share"] = (now - began) / elapsed_s
        metrics["async/rollout_wait_share"] = max(0.0, 1 - self._rollout.take_busy_s() / elapsed_s)
        metrics["async/queue_length"] = len(self.schedule.finished)
        metrics["async/running_groups"] = len(self.schedule.running)
        metrics |= self.sync_metrics | staleness_metrics(batch, self.policy_version)
        self.sync_metrics = {}
        return batch, metrics

    def _repair(self, error: Exception, repair: RolloutRepair) -> None:
        was_generating = self._rollout.interrupt()
        super()._repair(error, repair)
        self.is_updated = False
        self._rollout.recover(generate=was_generating)

    def pending(self) -> list[DataProto]:
        return [group.prompt for group in self._rollout.groups()]

    @property
    def num_dropped(self) -> int:
        return sum(self._rollout.num_dropped.values())

    def save(self, folder: Path) -> None:
        self.journal.sync()
        state = {
            "num_drawn": self.num_drawn,
            "groups": [_state_of(group) for group in self._rollout.groups()],
            "sync_metrics": self.sync_metrics,
            "is_updated": self.is_updated,
        }
        save_state(folder / STATE, state, owner="trainer.async_mode, of the prompts that are not trained on yet")

    def saved(self, step: int) -> None:
        self.journal.checkpoint(step)

    def close(self) -> None:
        for name in QUEUES:
            heartbeat.set_gauge(f"{name} groups", None)
        if self.rollout is not None:
            self.rollout.close()
            self.journal.close()
            self.rollout = None

    @property
    def _rollout(self) -> BackgroundRollout:
        assert self.rollout is not None, "the source is not started"
        return self.rollout

    def _take(self, prompts: Iterator[DataProto], step: int) -> list[Group]:
        """Wait for the groups of the step; draws prompts as long as there is room for more groups."""
        filtered = self._rollout.num_dropped["filtered"]
        while (groups := self._rollout.take(step)) is None:
            self.sampling.filter.check_dropped(self._rollout.num_dropped["filtered"] - filtered)
            self._draw(prompts)
        return groups

    def _draw(self, prompts: Iterator[DataProto]) -> None:
        with step_stop.shielded():
            batch = next(prompts)
            self.num_drawn += 1
            rows = range(len(batch))
            self._rollout.add([Group((self.num_drawn, row), batch[row : row + 1]) for row in rows])


def _length(schedule: GroupSchedule, queue: str) -> int:
    return len(getattr(schedule, queue))


def num_groups(checkpoint: Path) -> int:
    """Groups of a checkpoint that were drawn from the data and not trained on."""
    return len(load_state(checkpoint / STATE)["groups"]) if has_state(checkpoint / STATE) else 0


def staleness_metrics(batch: DataProto, policy_version: int) -> dict[str, float]:
    """How many updates ago the tokens of a batch were sampled; policy_version: of the policy that trains on it."""
    (versions,) = entries(batch.tensors, "policy_versions")
    age = (policy_version - versions)[versions >= 0].float()
    last = torch.cat([read(part, "policy_versions").max(-1).values for part in row_chunks(batch.tensors)])
    return {
        "async/staleness/mean": float(age.mean()) if len(age) else 0.0,
        "async/staleness/max": float(age.max()) if len(age) else 0.0,
        "async/mixed_policy_share": float((last > batch.tensors["policy_version"]).float().mean()),
    }


def batch_of_groups(groups: list[Group], step: int) -> DataProto:
    """What a step trains on: the samples of finished groups."""
    parts = []
    for group in groups:
        assert group.samples is not None
        samples = group.samples
        batch, row = group.id
        samples.meta_info["global_steps"] = step
        samples.non_tensor_batch["uid"] = object_array([str(uuid.UUID(int=(batch << 64) + row))] * len(samples))
        parts.append(samples)
    return concat_scored(parts)


def _state_of(group: Group) -> dict[str, Any]:
    samples = None if group.samples is None else group.samples.to_state()
    return {"id": list(group.id), "started": group.started, "prompt": group.prompt.to_state(), "samples": samples}


def group_of_state(state: dict[str, Any], num_samples: int) -> Group:
    """num_samples: a group with another number, because the user changed it, is sampled again."""
    samples = None if state["samples"] is None else DataProto.from_state(state["samples"])
    if samples is not None and len(samples) != num_samples:
        samples = None
    return Group(tuple(state["id"]), DataProto.from_state(state["prompt"]), state["started"], samples)
