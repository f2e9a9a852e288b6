"""`trainer.watchdog.*`: when a run counts as stuck (docs/watchdog.md)."""

from dataclasses import dataclass, field
from typing import Literal

from lockstep.config.bounds import PositiveFloat, SecondsByName

OnHang = Literal["warn", "stop", "restart"]

HEARTBEAT = "heartbeat"
"""In `deadlines_s`: how long a process may be silent while nothing moves."""
BETWEEN = "between phases"
"""The run's thread, while it has no phase."""
_ALL_PROGRAMS = (
    *(HEARTBEAT, BETWEEN, "start the run", "check the model", "read a batch", "validation", "save checkpoint"),
    *("log metrics", "write the profile", "copy the last checkpoint", "close the trackers"),
)
RL_PHASES = (
    *(*_ALL_PROGRAMS, "load models", "generate", "greedy baselines", "reward model", "rewards", "old log-probs"),
    *("reference log-probs", "values", "advantages", "update critic", "update actor", "send weights to the rollout"),
    *("write rollouts", "callback", "repair the rollout"),
)
SUPERVISED_PHASES = (*_ALL_PROGRAMS, "load the model", "compute reference log-probs", "forward", "update")
"""Names that `deadlines_s` may have: phases of a run that the watchdog sees."""


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
