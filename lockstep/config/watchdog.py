"""`trainer.watchdog.*`: when a run counts as stuck (docs/watchdog.md)."""

from dataclasses import dataclass, field
from typing import Literal

from lockstep.config.bounds import PositiveFloat, SecondsByName

OnHang = Literal["warn", "stop", "restart"]


@dataclass(frozen=True)
class WatchdogConfig:
    """A phase is stuck if nothing in it has moved for `multiple` times the longest pause that the run has seen in it."""

    enable: bool = True
    """Watch the phases of the run and the heartbeats of its processes."""
    multiple: PositiveFloat = 10.0
    """Deadline of a phase: this many times its longest pause so far."""
    min_deadline_s: PositiveFloat = 600.0
    """But at least this many seconds."""
    first_deadline_s: PositiveFloat = 3600.0
    """Deadline of a phase that the run has not completed yet, such as loading the models."""
    deadlines_s: SecondsByName = field(default_factory=dict)
    """Fixed deadlines: name of a phase, such as `rewards` or `update actor`, to seconds; `heartbeat` for a process that is stopped
    while others wait for it (default: 60, or `min_deadline_s` if that is less)."""
