"""What is sampled of a running program, and how it grows.

every N steps: processes (memory, handles, threads), files of the run, step times ─► series ─► Theil-Sen slopes ─► bounds
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.observability.memory_warning import kind_of
from lockstep.utils.host_memory import Process, run_processes

MIB = 2**20
STEPS = 1000
"""Slopes are per this number of steps."""


@dataclass(frozen=True)
class Quantity:
    """What is sampled.

    bound: largest slope, per STEPS steps. floor: growth over the second half that is noise, whatever the slope.
    relative: slope and growth are divided by the median.
    """

    unit: str
    bound: float
    floor: float
    relative: bool = False


QUANTITIES = {
    "memory": Quantity("MiB", bound=15, floor=12),
    "handles": Quantity("", bound=1, floor=3),
    "threads": Quantity("", bound=1, floor=2),
    "processes": Quantity("", bound=0.5, floor=1),
    "step time": Quantity("s", bound=0.1, floor=0.25, relative=True),
    "disk": Quantity("MiB", bound=15, floor=8),
    "GPU memory": Quantity("GiB", bound=0.05, floor=0.1),
}
"""Memory: of each process, without mapped files. Disk: of the run's folder without checkpoints, where logs grow by design."""


@dataclass
class Series:
    """Values of a quantity, by step. owner: a process or the run."""

    quantity: str
    owner: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def growth(self) -> tuple[float, float]:
        """Slope per STEPS steps and growth over the second half of the samples, by Theil-Sen."""
        half = slice(len(self.steps) // 2, None)
        steps, values = self.steps[half], self.values[half]
        if len(steps) < 3:
            return 0.0, 0.0
        scale = median(values) or 1.0 if QUANTITIES[self.quantity].relative else 1.0
        slope = theil_sen(steps, values) / scale
        return slope * STEPS, slope * (steps[-1] - steps[0])

    def exceeds(self, noise: float = 1.0) -> bool:
        """noise: a factor of the floor."""
        quantity = QUANTITIES[self.quantity]
        slope, growth = self.growth()
        return slope > quantity.bound and growth > noise * quantity.floor


def theil_sen(steps: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes of all pairs: outliers of less than about 29 % of the values do not change it much."""
    pairs = combinations(zip(steps, values), 2)
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x1 != x2)


class Sampler:
    """Series of a run with this process and folder."""

    def __init__(self, pid: int, run_dir: Path) -> None:
        self.pid = pid
        self.run_dir = run_dir
        self.series: dict[tuple[str, str], Series] = {}
        self.step_s: list[float] = []
        self.save_s: list[float] = []
        self._offset = 0
        self._recent_s: list[float] = []

    def read_steps(self) -> int:
        """Read the metrics that are new; returns the last step."""
        step = 0
        for row in self._new_rows():
            step = row["step"]
            self.step_s.append(row.get("timing_s/step", 0.0))
            self.save_s.append(row.get("timing_s/save_checkpoint", 0.0))
            self._recent_s.append(self.step_s[-1])
            if "perf/max_memory_allocated_gb" in row:
                self._add("GPU memory", "run", step, row["perf/max_memory_allocated_gb"])
        return step

    def sample(self, step: int) -> None:
        processes = run_processes(self.pid)
        processes = [p for p in processes if not p.command[:1] or not p.command[0].startswith("ray::")]
        self._add("processes", "run", step, len(processes))
        for process in processes:
            owner = f"{'trainer' if process.pid == self.pid else kind_of(process)[0]} (pid {process.pid})"
            self._add("memory", owner, step, process.own_bytes / MIB)
            self._add("handles", owner, step, _num_entries(process, "fd"))
            self._add("threads", owner, step, _num_entries(process, "task"))
        self._add("disk", "run", step, sum(_sizes(self.run_dir)) / MIB)
        if self._recent_s:
            self._add("step time", "run", step, median(self._recent_s))
            self._recent_s = []

    def _add(self, quantity: str, owner: str, step: int, value: float) -> None:
        self.series.setdefault((quantity, owner), Series(quantity, owner)).add(step, value)

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.run_dir / "metrics.jsonl", "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        yield from map(json.loads, complete.splitlines())


def _num_entries(process: Process, folder: str) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{process.pid}/{folder}").iterdir())
    except OSError:
        return 0  # it has ended


def _sizes(run_dir: Path) -> Iterator[int]:
    for file in run_dir.rglob("*"):
        if not any(
            part.startswith(("global_step_", ".staging-", ".pruned-")) for part in file.relative_to(run_dir).parts
        ):
            try:
                yield file.stat().st_size
            except OSError:
                continue
