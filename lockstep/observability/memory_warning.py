"""A warning before the host's memory runs out: which processes of the run have it, and what to lower.

    every CHECK_S: available memory of the machine and of its cgroup ─► low, or falling fast? ─► one warning

The kernel ends a process without a message when memory runs out, and not always the one that took it.
"""

import logging
import os
import time
from collections import deque
from pathlib import Path

from lockstep.utils.host_memory import Budget, Process, budgets, run_processes, shared_memory_bytes

logger = logging.getLogger(__name__)

CHECK_S = 5.0
LOW = 0.07
"""Share of the memory that is available at the warning."""
RECOVERED = 2 * LOW
"""Share above which a later shortage is told again."""
FALLING_BELOW = 0.3
SOON_S = 60.0
"""The warning also comes if less than FALLING_BELOW is available, and gone within SOON_S at the rate of the last samples."""
NUM_SAMPLES = 7
MOST_PROCESSES = 5
MIN_SHARE = 0.02
"""Of the memory: a process with less is not named."""

KINDS: dict[str, tuple[str, str]] = {
    "lockstep.rewards.worker": ("reward worker", "reward_model.reward_kwargs.num_workers"),
    "lockstep.single_controller.message_process": ("agent worker", "actor_rollout_ref.rollout.agent.num_workers"),
    "lockstep.utils.tied_process": ("dashboard", "trainer.dashboard=false"),
    "pt_data_worker": ("data-loader process", "data.dataloader_num_workers"),
}
"""Module of a process, or its name for the kernel, to what it is and the key that bounds how many there are."""
TRAINER = "trainer", "data.train_batch_size or actor_rollout_ref.rollout.n"
RAY = "Ray worker", "trainer.n_gpus_per_node, or use more machines"
SHARED = (
    "/dev/shm (Ray's object store)",
    "data.train_batch_size, or start Ray with a smaller --object-store-memory",
)
OTHER = "process started by the run", ""


class MemoryWarning:
    """root: of the file system, for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._samples: dict[str, deque[tuple[float, int]]] = {}
        self._told = False

    def check(self, now: float | None = None) -> None:
        """Warn if memory runs out. now: by the monotonic clock."""
        now = time.monotonic() if now is None else now
        found = budgets(self._root)
        short = [budget for budget in found if self._is_short(budget, now)]
        if short and not self._told:
            self._told = True
            logger.warning("%s", self._message(min(short, key=lambda budget: budget.available / budget.total)))
        elif all(budget.available >= RECOVERED * budget.total for budget in found) and not short:
            self._told = False

    def _is_short(self, budget: Budget, now: float) -> bool:
        samples = self._samples.setdefault(budget.name, deque(maxlen=NUM_SAMPLES))
        samples.append((now, budget.available))
        if budget.available < LOW * budget.total:
            return True
        if budget.available >= FALLING_BELOW * budget.total or len(samples) < NUM_SAMPLES:
            return False
        (first_time, first), (last_time, last) = samples[0], samples[-1]
        lost_per_s = (first - last) / max(last_time - first_time, 1e-9)
        return lost_per_s * SOON_S > last

    def _message(self, budget: Budget) -> str:
        processes = run_processes(os.getpid(), self._root)
        largest = sorted(processes, key=lambda process: -process.own_bytes)[:MOST_PROCESSES]
        named = [p for p in largest if p.own_bytes >= MIN_SHARE * budget.total]
        holders = [(*kind_of(p), f"pid {p.pid}", p.own_bytes) for p in named]
        if (shared := shared_memory_bytes(str(self._root / "dev/shm"))) >= MIN_SHARE * budget.total:
            holders.append((*SHARED, "", shared))
        listed = ", ".join(f"{kind}{f' ({pid})' if pid else ''} {_gib(size)}" for kind, _, pid, size in holders)
        keys = dict.fromkeys(key for _, key, _, _ in sorted(holders, key=lambda holder: -holder[3]) if key)
        return (
            f"memory of {budget.name} runs out: {_gib(budget.available)} of {_gib(budget.total)} are left; the kernel may end a "
            f"process of this run. Most is held by: {listed or 'no process of this run'}. "
            + (f"Lower {'; '.join(keys)}." if keys else "Other programs of this machine hold it.")
        )


def kind_of(process: Process) -> tuple[str, str]:
    """What a process of the run is, and the key that bounds it."""
    if process.pid == os.getpid():
        return TRAINER
    if process.command and process.command[0].startswith("ray::"):
        return f"{RAY[0]} {process.command[0].removeprefix('ray::')}", RAY[1]
    names = [process.comm, *process.command[:5]]
    return next((KINDS[name] for name in names if name in KINDS), OTHER)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
