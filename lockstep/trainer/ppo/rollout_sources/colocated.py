"""Actor and rollout share their workers: a step ends when enough groups are finished, and the rest goes on after the update.

    step 1   generate ████████ a b c d│e.. f.   pause │ train on a b c d │
    step 2                              resume e f, start g h … │ generate ██████ │ pause │ train on e f g h │

The slowest responses no longer hold up the step that began them. Their first tokens are of an earlier policy.
"""

from collections.abc import Iterator

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group
from lockstep.trainer.ppo.rollout_sources.rollout_source import AsyncSource


class ColocatedSource(AsyncSource):
    """Idle outside of `collect`."""

    def _take(self, prompts: Iterator[DataProto], step: int) -> list[Group]:
        self._rollout.resume()
        try:
            groups = super()._take(prompts, step)
        except BaseException:
            self._rollout.interrupt()
            raise
        self.repairing(self._rollout.pause)  # here, because the groups are taken: calling this again takes others
        return groups
