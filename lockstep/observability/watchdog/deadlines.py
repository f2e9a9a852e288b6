"""How long a phase may go without a sign of progress: as configured, or learnt from the run itself."""

from collections.abc import Callable, Sequence

from lockstep.config.watchdog import WatchdogConfig
from lockstep.utils.progress import is_completed


class Deadlines:
    """A deadline by name of a phase, the first of

        `watchdog.deadlines_s[phase]`
        max(`min_deadline_s`, `multiple` x the longest pause between two signs of progress), if the phase was completed before
        `first_deadline_s`

    is_completed: whether a phase of this name has ended before.
    """

    def __init__(self, config: WatchdogConfig, is_completed: Callable[[str], bool] = is_completed) -> None:
        self.config = config
        self._is_completed = is_completed
        self._longest: dict[str, float] = {}

    def paused(self, phases: Sequence[str], seconds: float) -> None:
        """There was a sign of progress after a pause, within these nested phases."""
        for name in phases:
            self._longest[name] = max(seconds, self._longest.get(name, 0.0))

    def of(self, phases: Sequence[str]) -> float:
        """The deadline of nested phases, outermost first: that of the innermost one which has one."""
        config = self.config
        for name in reversed(phases):
            if name in config.deadlines_s:
                return config.deadlines_s[name]
        for name in reversed(phases):
            if self._is_completed(name):
                return max(config.min_deadline_s, config.multiple * self._longest.get(name, 0.0))
        return config.first_deadline_s
