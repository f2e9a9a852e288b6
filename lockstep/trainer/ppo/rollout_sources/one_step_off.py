"""A separate rollout pool generates batch k + 1 while the actor trains on batch k.

    rollout   generate 1 │ generate 2 (policy 0) │ generate 3 (policy 1) │ …
    actor                │ train on 1            │ train on 2            │ …

Weights are sent between two batches. So each batch is of one policy, the last but one, and results do not depend on timing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group
from lockstep.trainer.ppo.rollout_sources.rollout_source import AsyncSource


class OneStepOffSource(AsyncSource):
    ahead = 0

    def _take(self, prompts: Iterator[DataProto], step: int) -> list[Group]:
        schedule = self.schedule
        next_batch = schedule.per_step if schedule.max_staleness > 0 and step < schedule.last_step else 0
        if not schedule.running and not schedule.finished:
            self._send_weights()
        # before groups are taken: no prompt is drawn if the run is to stop
        while len(schedule.waiting) < schedule.room(step) + next_batch:
            self._draw(prompts)
        self._rollout.resume()
        groups = super()._take(prompts, step)
        if next_batch:
            self.repairing(
                lambda: self._begin_next(step)
            )  # here, because the groups are taken: calling this again takes others
        return groups

    def _begin_next(self, step: int) -> None:
        self._send_weights()
        self._rollout.resume()
        self._rollout.start(step)

    def update_weights(self, policy_version: int) -> dict[str, float]:
        self.policy_version = policy_version
        self.is_updated = True
        return {}

    @contextmanager
    def idle(self) -> Iterator[None]:
        self._rollout.finish_all()
        self._send_weights()
        self._rollout.pause()
        yield

    def _send_weights(self) -> None:
        if self.is_updated:
            self._rollout.pause()
            self.sync_metrics |= self._send()
            self.is_updated = False
