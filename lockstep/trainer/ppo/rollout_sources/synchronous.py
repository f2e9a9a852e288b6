"""Generate, score, train, in turn: every sample is of the current policy."""

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.rollout_sources.rollout_source import RolloutSource, num_groups
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.weight_sync import WeightSync

logger = logging.getLogger(__name__)


class SynchronousSource(RolloutSource):
    def __init__(self, sampling: Sampling, weight_sync: WeightSync | None) -> None:
        super().__init__(weight_sync)
        self.sampling = sampling

    def start(self, run_dir: Path, step: int, policy_version: int, checkpoint: Path | None) -> None:
        super().start(run_dir, step, policy_version, checkpoint)
        if checkpoint is not None and (num_ahead := num_groups(checkpoint)):
            logger.warning(
                "%s holds %d prompts that asynchronous training drew ahead; without trainer.async_mode they are skipped",
                checkpoint,
                num_ahead,
            )

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        drawn: list[DataProto] = []

        def recorded(rest: Iterator[DataProto]) -> Iterator[DataProto]:
            for batch in rest:
                drawn.append(batch)
                yield batch

        def collect() -> tuple[DataProto, dict[str, float]]:
            again = list(drawn)
            return self.sampling.collect(chain(again, recorded(prompts)), step=step, timing=timing)

        return self.repairing(collect)
