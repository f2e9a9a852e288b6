"""Notices about a reward, tool, judge, … that is slow but not stuck: one line with its name, repeated rarely."""

import re
from collections.abc import Sequence

from lockstep.utils.heartbeat import ProcessState

KINDS = ("reward", "tool", "judge", "interaction", "environment", "program", "server")
LEAST_S = 30.0
"""A wait that takes less is not slow."""
TIMES_USUAL = 5.0
REPEAT_S = 600.0
"""Between two notices about the same one."""
MAX_NAMES = 1000

_Key = tuple[str, str]
"""Kind and name."""


class SlowWaits:
    """Looks at the waits of all processes, about once per second."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str, float], float] = {}
        """(pid, kind, name, began) to the seconds that it has lasted."""
        self._usual_s: dict[_Key, float] = {}
        """The longest wait that has ended."""
        self._noticed: dict[_Key, float] = {}

    def look(self, states: Sequence[ProcessState], now: float) -> list[str]:
        """A line for each that is slow, and was not mentioned lately."""
        waits = {
            (state.pid, wait.kind, wait.name, wait.began): state.now - wait.began
            for state in states
            for wait in state.waits
            if wait.kind in KINDS
        }
        for ended in self._open.keys() - waits.keys():
            key = ended[1], base_name(ended[2])
            if key in self._usual_s or len(self._usual_s) < MAX_NAMES:
                self._usual_s[key] = max(self._open[ended], self._usual_s.get(key, 0.0))
        self._open = waits
        lines = []
        for (_, kind, name, _), seconds in waits.items():
            key = kind, base_name(name)
            usual_s = self._usual_s.get(key)
            is_noticed = key in self._noticed and now - self._noticed[key] < REPEAT_S
            if is_noticed or seconds <= max(LEAST_S, TIMES_USUAL * (usual_s or 0.0)):
                continue
            if len(self._noticed) < MAX_NAMES or key in self._noticed:
                self._noticed[key] = now
                before = "" if usual_s is None else f"; until now it took at most {usual_s:.0f} s"
                lines.append(f"the {kind} {name} is slow: no answer for {seconds:.0f} s{before}")
        return lines


def base_name(name: str) -> str:
    """Without the row, the process or the like of one call."""
    return re.split(r", row |, process | \(pid ", name)[0]
