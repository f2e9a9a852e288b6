"""How long steps take, and the time that is left."""

import time
from collections import deque

from lockstep.observability.step_line import first_number
from lockstep.observability.tracker import Metrics

STEPS_AVERAGED = 20


class StepTimes:
    """Durations of the last steps, in seconds, to estimate the remaining time."""

    def __init__(self) -> None:
        self.durations: deque[float] = deque(maxlen=STEPS_AVERAGED)
        self._last: tuple[int, float] | None = None

    def seconds_left(self, data: Metrics, step: int, total_steps: int | None) -> float | None:
        """Record a finished step and estimate the remaining time. A step's duration is the time since the previous call,
        including validation and saving; for the first call it is the step's own time."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            self.durations.append((now - self._last[1]) / (step - self._last[0]))
        elif self._last is None and (own := first_number(data, ("timing_s/step",))) is not None:
            self.durations.append(own)
        self._last = (step, now)
        if total_steps is None or not self.durations:
            return None
        return max(0, total_steps - step) * sum(self.durations) / len(self.durations)
