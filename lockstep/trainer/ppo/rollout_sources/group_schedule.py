"""Which groups of samples may be generated ahead of training, and which a step trains on. No threads, no files.

    drawn from the data ─► waiting ─► running ─► finished ─► taken by a step
                                         └──────────┴──────► dropped

A group that starts in step s (with the weights before that step's update) may be trained on until step s + max_staleness.
"""

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lockstep.protocol import DataProto

GroupId = tuple[int, int]
"""Number of a batch of prompts, from 1, and of the prompt's row in it."""


@dataclass(eq=False)
class Group:
    """The samples of one prompt.

    prompt:  its row of the batch.
    started: the step in which its generation began; 0 if it has not.
    samples: its scored samples, if it is finished.
    """

    id: GroupId
    prompt: DataProto
    started: int = 0
    samples: DataProto | None = None


class GroupSchedule:
    """per_step: groups that a step trains on.

    stale:     wait for a group that would become too old, or drop it.
    ahead:     how many batches besides that of the step are live at most; max_staleness by default.
    last_step: no group is started that no step would train on.
    """

    def __init__(
        self,
        per_step: int,
        max_staleness: int,
        stale: Literal["wait", "drop"] = "wait",
        ahead: int | None = None,
        last_step: int = sys.maxsize,
    ) -> None:
        self.per_step = per_step
        self.max_staleness = max_staleness
        self.stale = stale
        self.ahead = max_staleness if ahead is None else ahead
        self.last_step = last_step
        self.waiting: deque[Group] = deque()
        self.running: dict[GroupId, Group] = {}
        self.finished: dict[GroupId, Group] = {}

    def room(self, step: int) -> int:
        """Groups that may be started in this step."""
        batches = 1 + min(self.ahead, self.last_step - step)
        return max(0, batches * self.per_step - len(self.running) - len(self.finished))

    def start(self, step: int) -> list[Group]:
        """Begin as many waiting groups as there is room for; returns them."""
        started = [self.waiting.popleft() for _ in range(min(self.room(step), len(self.waiting)))]
        for group in started:
            group.started = step
            self.running[group.id] = group
        return started

    def finish(self, group: Group, samples: DataProto) -> None:
        del self.running[group.id]
        group.samples = samples
        self.finished[group.id] = group

    def drop(self, group: Group) -> None:
        self.running.pop(group.id, None)
        self.finished.pop(group.id, None)

    def too_old(self, step: int) -> list[Group]:
        """The groups that may no longer be trained on, if they are dropped."""
        live = [*self.running.values(), *self.finished.values()]
        return [g for g in live if g.started + self.max_staleness < step] if self.stale == "drop" else []

    def take(self, step: int) -> list[Group] | None:
        """The groups that the step trains on, in the order of their ids; None if more must finish first."""
        oldest_first = sorted(self.finished.values(), key=lambda group: (group.started, group.id))
        taken, left = oldest_first[: self.per_step], oldest_first[self.per_step :]
        if len(taken) < self.per_step:
            return None
        if self.stale == "wait" and self._late([*left, *self.running.values()], step + 1):
            return None
        for group in taken:
            del self.finished[group.id]
        return sorted(taken, key=lambda group: group.id)

    def restore(self, groups: Iterable[Group], step: int) -> None:
        """Add the groups of a checkpoint, before the first step after it; those that would be too old are sampled again."""
        groups = sorted(groups, key=lambda group: group.id)
        late = self._late([group for group in groups if group.samples is not None], step)
        for group in groups:
            if group.samples is None or group in late:
                group.samples = None
                group.started = 0
                self.waiting.append(group)
            else:
                self.finished[group.id] = group

    def _late(self, groups: Iterable[Group], step: int) -> list[Group]:
        """Those that would be too old if the steps from `step` on train on all the groups, oldest first."""
        oldest_first = sorted(groups, key=lambda group: group.started)
        steps = (step + number // self.per_step for number in range(len(oldest_first)))
        return [g for g, trained in zip(oldest_first, steps) if g.started + self.max_staleness < trained]
