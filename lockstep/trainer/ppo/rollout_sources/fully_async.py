"""A separate rollout pool generates all the time; finished groups wait in a queue until a step trains on them.

    rollout   ██████████████│██████████████│████████     │ weights arrive: responses go on with them
    actor        │ train on 1 │ train on 2 │ train on 3

`trainer.max_staleness` bounds how old a group may be when a step trains on it, and how many batches are generated ahead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.protocol import DataProto
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group
from lockstep.trainer.ppo.rollout_sources.rollout_source import AsyncSource


class FullyAsyncSource(AsyncSource):
    def _take(self, prompts: Iterator[DataProto], step: int) -> list[Group]:
        self._rollout.resume()
        return super()._take(prompts, step)

    def _send(self) -> dict[str, float]:
        with self.idle():
            return super()._send()

    @contextmanager
    def idle(self) -> Iterator[None]:
        self._rollout.pause()
        yield
        self._rollout.resume()
