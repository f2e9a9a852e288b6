"""Where a replayed step gets its samples from, if they are not generated again: a run's journal, or the dump of an audit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.protocol import DataProto
from lockstep.trainer.ppo import forks
from lockstep.trainer.ppo.batch_dump import read_dump
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group, GroupId
from lockstep.trainer.ppo.rollout_sources.journal import finished_samples, trained_groups
from lockstep.trainer.ppo.rollout_sources.rollout_source import (
    STATE,
    RolloutSource,
    batch_of_groups,
    group_of_state,
    staleness_metrics,
)
from lockstep.trainer.replay.source_run import JournalPart
from lockstep.utils.state_file import has_state, load_state
from lockstep.weight_sync import WeightSync

SAMPLED = (
    *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
    *("policy_version", "policy_versions", "sampling_seed", "rollout_log_probs", "routed_experts"),
    *("rm_scores", "token_level_scores", "reward_baselines", forks.OWNER),
)
"""Columns that a source gives; those of later stages are computed again."""


class DumpedBatch(RolloutSource):
    """The samples of another source, but in one step those of a dump. draws: whether that step draws a batch of prompts."""

    def __init__(self, source: RolloutSource, step: int, dump: Path, *, draws: bool) -> None:
        super().__init__(source.weight_sync)
        self.source = source
        self.step = step
        self.dump = dump
        self.draws = draws
        self.keeps_prompts = source.keeps_prompts

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        if step != self.step:
            return self.source.collect(prompts, step=step, timing=timing)
        if self.draws:
            next(prompts)
        batch = read_dump(self.dump).batch
        return batch.select([name for name in SAMPLED if name in batch.tensors]), {}

    def update_weights(self, policy_version: int) -> dict[str, float]:
        return self.source.update_weights(policy_version)

    def idle(self) -> Any:
        return self.source.idle()

    def close(self) -> None:
        self.source.close()


class JournalSamples(RolloutSource):
    """The samples that each step of an asynchronous run trained on. num_samples: of a prompt."""

    keeps_prompts = True

    def __init__(
        self,
        journal: JournalPart,
        num_samples: int,
        weight_sync: WeightSync | None = None,
        policy_version: int = 0,
    ) -> None:
        super().__init__(weight_sync)
        self.trained = trained_groups(journal.run)
        finished = dict(finished_samples(journal.run, journal.begin))
        self.samples = finished | _saved_samples(journal.checkpoint, num_samples)
        self.policy_version = policy_version

    def missing(self, first: int, last: int) -> int | None:
        """The first of these steps whose samples are not all there."""
        for step in range(first, last + 1):
            if not self.trained.get(step) or any(group not in self.samples for group in self.trained[step]):
                return step
        return None

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        groups = [Group(group, DataProto(), samples=self.samples[group]) for group in self.trained[step]]
        batch = batch_of_groups(groups, step)
        return batch, staleness_metrics(batch, self.policy_version)

    def update_weights(self, policy_version: int) -> dict[str, float]:
        self.policy_version = policy_version
        return super().update_weights(policy_version)


def _saved_samples(checkpoint: Path | None, num_samples: int) -> dict[GroupId, DataProto]:
    """Those of the groups that were finished when a checkpoint was saved."""
    if checkpoint is None or not has_state(checkpoint / STATE):
        return {}
    groups = [group_of_state(state, num_samples) for state in load_state(checkpoint / STATE)["groups"]]
    return {group.id: group.samples for group in groups if group.samples is not None}
