"""The kinds of faults, and what each may lead to."""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.faults.runs import STEPS, Ended, Lab, Running, difference, leftovers, remove, result
from tests.faults.shim import Action, Injection

LOCAL = ("ppo", "grpo", "filter_groups")

MAX_RESUMES = 3
"""Runs after the fault until the last step must be done."""

FOLDER_KEY = "trainer.default_local_dir"


@dataclass(frozen=True)
class Case:
    """One fault. moment: from 0, the start of the run, to 1, its end: of its file-system events or of its time."""

    kind: str
    config: str
    moment: float
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} in {self.config} at {self.moment:.3f}"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    inject:  runs the case's first run, with the fault.
    configs: configurations that it is injected into.
    codes:   allowed exit codes of that run; 0 if the fault may come after its last step.
    says:    what the one line of an exit code 1 or 2 names: one of these.
    lines:   most error lines; 2 if the controller may report the fault and then die of it too.
    weight:  its share of the cases.
    more:    further settings of all runs of the case.
    tracebacks: other threads may fail too, each with its own traceback.
    """

    inject: Callable[["Bench", Case, Path], Ended]
    configs: tuple[str, ...] = LOCAL
    codes: tuple[int, ...] = (0,)
    says: tuple[str, ...] = ()
    lines: int = 1
    weight: float = 1.0
    more: tuple[str, ...] = ()
    tracebacks: bool = False


@dataclass(frozen=True)
class Baseline:
    """An undisturbed run: its result, how long it takes, and its number of file-system events."""

    folder: Path
    result: dict[str, Any]
    seconds: float
    num_events: int


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    code:    exit code of the run with the fault.
    hit:     False if the fault came after the end of that run, or did nothing.
    problem: empty if everything holds.
    """

    case: Case
    code: int | None
    hit: bool
    message: str
    problem: str

    def __str__(self) -> str:
        if self.problem:
            return "failed"
        return "no effect" if not self.hit else "stopped, resumed, equal" if self.code else "finished, equal"


class Bench:
    """Runs cases in a Lab; the undisturbed run of a configuration is shared by its cases."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._baselines: dict[str, Baseline] = {}

    def baseline(self, config: str) -> Baseline:
        if config not in self._baselines:
            folder = self.lab.folder / f"baseline_{config}"
            folder.mkdir()
            events = folder / "events.txt"
            begin = time.monotonic()
            ended = self.lab.run(config, folder, injection=Injection("count", 0, str(folder / "run"), str(events)))
            seconds = time.monotonic() - begin
            assert ended.code == 0 and not ended.left and not leftovers(folder), ended
            num_events = len(events.read_text().splitlines())
            self._baselines[config] = Baseline(folder, result(folder / "run"), seconds, num_events)
        return self._baselines[config]

    def run(self, case: Case) -> Outcome:
        baseline = self.baseline(case.config)
        folder = self.lab.folder / "case"
        remove(folder)
        folder.mkdir()
        kind = KINDS[case.kind]
        self.lab.more = kind.more
        try:
            ended = kind.inject(self, case, folder)
            message = " | ".join(ended.errors)
            problem = _wrong_end(ended, kind) or _left(ended, folder)
            if not problem:
                problem = self._resume(case.config, folder, baseline)
        finally:
            self.lab.more = ()
        return Outcome(case, ended.code, ended.hit, message, problem)

    def _resume(self, config: str, folder: Path, baseline: Baseline) -> str:
        """Run the same command until it is done; the first problem, or an empty string."""
        for _ in range(MAX_RESUMES):
            ended = self.lab.run(config, folder)
            if ended.code == 0:
                break
            if "Traceback" in ended.stderr or len(ended.errors) != 1:
                break
        if ended.code != 0:
            return f"the resumed run ended with {ended.code}: {_tail(ended)}"
        return difference(result(folder / "run"), baseline.result) or _left(ended, folder)


ABORTED = -signal.SIGABRT
"""How compiled libraries end a process that runs out of memory."""
CRASHED = -signal.SIGSEGV
"""The same without a message: oneDNN uses the memory that it did not get."""
KILLED = (-signal.SIGKILL, ABORTED, CRASHED)
LOGGED_BY_TORCH = "Unexpected error importing torch.profiler._cupti_monitor"
"""With a traceback, if the signal of a dead data-loader worker raises during that import; the run ends by itself afterwards."""


def _wrong_end(ended: Ended, kind: Kind) -> str:
    if ended.code not in kind.codes:
        return f"exit code {ended.code}: {_tail(ended)}"
    if "Traceback" in ended.stderr and LOGGED_BY_TORCH not in ended.stderr and not kind.tracebacks:
        return f"exit code {ended.code} with a traceback: {_tail(ended)}"
    if ended.code in (1, 2):
        if not 1 <= len(ended.errors) <= kind.lines:
            return f"exit code {ended.code} with {len(ended.errors)} error lines: {_tail(ended)}"
        if kind.says and not any(text in ended.errors[0] for text in kind.says):
            return f"the message does not name the cause: {ended.errors[0]}"
    if ended.code == ABORTED and not any(text in ended.stderr for text in kind.says):
        return f"aborted without a cause: {_tail(ended)}"
    if ended.code == 130 and ended.errors:
        return f"stopped by the user, but: {ended.errors[0]}"
    return ""


def _left(ended: Ended, folder: Path) -> str:
    found = ended.left + leftovers(folder)
    if ended.code in KILLED:  # the next run removes what is in its folder
        found = [name for name in found if not name.startswith("run/")]
    return f"left behind: {'; '.join(found)}" if found else ""


def _tail(ended: Ended) -> str:
    return " / ".join(ended.stderr.strip().splitlines()[-3:])


def _at_event(action: Action) -> Callable[[Bench, Case, Path], Ended]:
    def inject(bench: Bench, case: Case, folder: Path) -> Ended:
        at = 1 + int(case.moment * bench.baseline(case.config).num_events)
        return bench.lab.run(
            case.config, folder, injection=Injection(action, at, str(folder / "run"), str(folder / "events.txt"))
        )

    return inject


def _at_time(disturb: Callable[[Running, Case], None]) -> Callable[[Bench, Case, Path], Ended]:
    def inject(bench: Bench, case: Case, folder: Path) -> Ended:
        def wait_and_disturb(run: Running) -> None:
            end = time.monotonic() + case.moment * bench.baseline(case.config).seconds
            while time.monotonic() < end and run.is_alive():
                time.sleep(0.002)
            disturb(run, case)

        return bench.lab.run(case.config, folder, disturb=wait_and_disturb)

    return inject


def _signal(number: int) -> Callable[[Bench, Case, Path], Ended]:
    return _at_time(lambda run, case: run.kill(run.pid, number))


def _signal_all(run: Running, case: Case) -> None:
    for pid in run.lab.processes():
        run.kill(pid, signal.SIGTERM)


def _kill_process(text: str) -> Callable[[Bench, Case, Path], Ended]:
    """kill -9 a process of the run by its command line."""
    return _at_time(lambda run, case: run.kill(run.find(text)))


def _kill_loader(run: Running, case: Case) -> None:
    """kill -9 the data-loader process: the one that is forked from the run."""
    while run.is_alive():
        for pid, line in run.lab.processes().items():
            if pid != run.pid and "tests.faults.server" in line:
                return run.kill(pid)
        time.sleep(0.002)


def _kill_head_at_the_end(bench: "Bench", case: Case, folder: Path) -> Ended:
    """kill -9 Ray's head process (GCS) when the last checkpoint is written."""

    def disturb(run: Running) -> None:
        if run.wait_for(f"run/global_step_{STEPS}"):
            run.kill(run.find("gcs_server"))

    return bench.lab.run(case.config, folder, disturb=disturb)


def _damage(how: Literal["truncated", "flipped", "missing"]) -> Callable[[Bench, Case, Path], Ended]:
    """Damage a file of the newest checkpoint, or of all, of a finished run."""

    def inject(bench: Bench, case: Case, folder: Path) -> Ended:
        shutil.copytree(bench.baseline(case.config).folder / "run", folder / "run")
        checkpoint = folder / "run" / f"global_step_{STEPS}"
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        path = files[int(case.moment * len(files))]
        data = path.read_bytes()
        if how == "missing":
            path.unlink()
        elif how == "truncated":
            path.write_bytes(data[: len(data) // 2])
        else:
            at = random.Random(case.seed).randrange(len(data))
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        return replace(bench.lab.run(case.config, folder), hit=True)

    return inject


def _in_the_way(bench: Bench, case: Case, folder: Path) -> Ended:
    """A folder in place of a file, or a file in place of a folder; removed again before the run is resumed."""
    names = ("config.yaml/", "metrics.jsonl/", "latest_checkpointed_iteration.txt/", "global_step_2", ".run.lock/")
    name = names[int(case.moment * len(names))]
    path = folder / "run" / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith("/"):
        (path / "full").mkdir(parents=True)
    else:
        path.write_text("")
    ended = bench.lab.run(case.config, folder)
    if ended.code != 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return replace(ended, hit=True)


def _memory_limit(bench: Bench, case: Case, folder: Path) -> Ended:
    ended = bench.lab.run(case.config, folder, memory_mb=int(case.moment * 400))
    return replace(ended, hit=ended.code != 0)


STOPPED = (0, 130)
WITH_AGENTS = (*LOCAL, "agents")
SHORT = "trainer.preemption_grace_s=0.01"
"""A step is discarded unless its update has begun."""
LONG = "trainer.preemption_grace_s=60"
DISK = (0, 1, 2)

KINDS: dict[str, Kind] = {
    "kill -9 at an event": Kind(_at_event("kill"), codes=(0, -signal.SIGKILL), weight=4),
    "SIGTERM at an event": Kind(_at_event("term"), codes=STOPPED, weight=3),
    "SIGINT at an event": Kind(_at_event("int"), codes=STOPPED, weight=2),
    "SIGTERM to all processes at an event": Kind(_at_event("term all"), codes=STOPPED, weight=2),
    "kill -9 at a random moment": Kind(_signal(signal.SIGKILL), codes=(0, -signal.SIGKILL), weight=2),
    "SIGTERM at a random moment": Kind(_signal(signal.SIGTERM), codes=STOPPED, weight=3),
    "SIGINT at a random moment": Kind(_signal(signal.SIGINT), codes=STOPPED, weight=2),
    "SIGTERM to all processes at a random moment": Kind(_at_time(_signal_all), codes=STOPPED, weight=2),
    "disk full": Kind(_at_event("disk full"), codes=DISK, says=(FOLDER_KEY,), weight=2),
    "read-only folder": Kind(_at_event("read-only"), codes=DISK, says=(FOLDER_KEY,)),
    "file too large": Kind(_at_event("too large"), codes=DISK, says=(FOLDER_KEY,), weight=0.5),
    "folder in the way of a file": Kind(_in_the_way, codes=DISK, says=(FOLDER_KEY,)),
    "memory limit": Kind(_memory_limit, codes=(0, 1, ABORTED, CRASHED), says=("memory", "bad_alloc"), tracebacks=True),
    "truncated checkpoint": Kind(_damage("truncated"), weight=0.7),
    "flipped byte in a checkpoint": Kind(_damage("flipped"), weight=0.7),
    "file missing in a checkpoint": Kind(_damage("missing"), weight=0.7),
    "killed reward worker": Kind(_kill_process("lockstep.rewards.worker"), codes=(0, 1), says=("reward",)),
    "killed data-loader worker": Kind(
        _at_time(_kill_loader), configs=("grpo",), codes=(0, 1), says=("data.dataloader_num_workers",)
    ),
    "killed agent worker": Kind(
        _kill_process("single_controller.message_process"), configs=("agents",), codes=(0, 1), says=("agent worker",)
    ),
    "pre-emption": Kind(_signal(signal.SIGTERM), configs=WITH_AGENTS, codes=STOPPED, more=(SHORT,), weight=2),
    "pre-emption at an event": Kind(_at_event("term"), configs=WITH_AGENTS, codes=STOPPED, more=(SHORT,)),
    "pre-emption of all processes": Kind(_at_time(_signal_all), configs=WITH_AGENTS, codes=STOPPED, more=(SHORT,)),
    "pre-emption with time for the step": Kind(_signal(signal.SIGTERM), codes=STOPPED, more=(LONG,), weight=0.5),
    "Ray: pre-emption": Kind(_signal(signal.SIGTERM), configs=("ray",), codes=STOPPED, more=(SHORT,), weight=0.25),
    "Ray: killed worker, restarted": Kind(
        _kill_process("ray::WorkerHost"), configs=("ray",), more=("trainer.max_restarts=2",), weight=0.25
    ),
    "Ray: killed worker of separate pools, replaced or restarted": Kind(
        _kill_process("ray::WorkerHost"), configs=("split",), more=("trainer.max_restarts=2",), weight=0.25
    ),
    "Ray: SIGTERM": Kind(_signal(signal.SIGTERM), configs=("ray",), codes=STOPPED, weight=0.25),
    "Ray: SIGTERM to all processes": Kind(_at_time(_signal_all), configs=("ray",), codes=(0, 1, 130), weight=0.25),
    "Ray: kill -9 of the driver": Kind(
        _signal(signal.SIGKILL), configs=("ray",), codes=(0, -signal.SIGKILL), weight=0.25
    ),
    "Ray: killed worker": Kind(_kill_process("ray::WorkerHost"), configs=("ray",), codes=(0, 1), weight=0.25),
    "Ray: killed controller": Kind(_kill_process("ray::Runner"), configs=("ray",), codes=(0, 1), weight=0.25),
    "Ray: killed raylet": Kind(_kill_process("raylet/raylet"), configs=("ray",), codes=(0, 1), lines=2, weight=0.25),
    "Ray: killed GCS": Kind(_kill_process("gcs_server"), configs=("ray",), codes=(0, 1), weight=0.25),
    "Ray: killed GCS after the last step": Kind(_kill_head_at_the_end, configs=("ray",), weight=0.25),
}


def plan(count: int, seed: int, kinds: list[str] | None = None) -> Iterator[Case]:
    """Random cases: every kind in proportion to its weight, moments spread evenly."""
    chance = random.Random(seed)
    names = kinds or list(KINDS)
    total = sum(KINDS[name].weight for name in names)
    wanted = {name: KINDS[name].weight / total * count for name in names}
    cases = []
    for name, share in wanted.items():
        number = int(share) + (chance.random() < share - int(share))
        configs = KINDS[name].configs
        offset = chance.random()
        cases += [
            Case(name, configs[i % len(configs)], (i + offset) / max(number, 1) % 1, chance.randrange(1 << 30))
            for i in range(number)
        ]
    chance.shuffle(cases)
    yield from cases[:count]
