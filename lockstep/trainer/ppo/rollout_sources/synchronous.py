"""Generate, score, train, in turn: every sample is of the current policy."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.rollout_sources.rollout_source import num_groups
from lockstep.trainer.ppo.sampling import Sampling
from lockstep.weight_sync import WeightSync

logger = logging.getLogger(__name__)


class SynchronousSource:
    keeps_prompts = False

    def __init__(self, sampling: Sampling, weight_sync: WeightSync | None) -> None:
        self.sampling, self.weight_sync = sampling, weight_sync

    def start(self, run_dir: Path, step: int, policy_version: int, checkpoint: Path | None) -> None:
        if checkpoint is not None and (num_ahead := num_groups(checkpoint)):
            logger.warning(
                "%s holds %d prompts that asynchronous training drew ahead; without trainer.async_mode they are skipped",
                checkpoint,
                num_ahead,
            )

    def collect(
        self, prompts: Iterator[DataProto], *, step: int, timing: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        return self.sampling.collect(prompts, step=step, timing=timing)

    def update_weights(self, policy_version: int) -> dict[str, float]:
        return {} if self.weight_sync is None else self.weight_sync.run(policy_version)

    def idle(self) -> AbstractContextManager[None]:
        return nullcontext()

    def save(self, folder: Path) -> None:
        """No-op."""

    def saved(self, step: int) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""
