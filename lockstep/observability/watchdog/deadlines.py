"""How long a phase may go without a sign of progress: as configured, or learnt from the run itself."""

import time
from collections.abc import Sequence

from lockstep.config.watchdog import BETWEEN, WatchdogConfig
from lockstep.utils import progress


class Deadlines:
    """A deadline by name of a phase, the first of

        `watchdog.deadlines_s[phase]`
        max(`min_deadline_s`, `multiple` x the longest pause between two signs of progress), if the phase was completed before
        `first_deadline_s`

    It is made once per command: what was learnt holds after a restart, but not for another run of the same process.
    """

    def __init__(self, config: WatchdogConfig) -> None:
        self.config = config
        self._began = time.monotonic()
        self._longest: dict[str, float] = {}

    def paused(self, phases: Sequence[str], seconds: float) -> None:
        """There was a sign of progress after a pause, within these nested phases. A pause beyond the deadline is not learnt."""
        if seconds > self.of(phases):
            return
        for name in phases:
            self._longest[name] = max(seconds, self._longest.get(name, 0.0))

    def of(self, phases: Sequence[str]) -> float:
        """The deadline of nested phases, outermost first: that of the innermost one which has one."""
        config = self.config
        for name in reversed(phases):
            if name in config.deadlines_s:
                return config.deadlines_s[name]
        completed = progress.completed(self._began)
        for name in reversed(phases):
            if name in completed or (name == BETWEEN and name in self._longest):
                return max(config.min_deadline_s, config.multiple * self._longest.get(name, 0.0))
        return config.first_deadline_s
