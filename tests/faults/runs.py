"""Starts training runs, and compares what they leave."""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.faults.shim import Injection
from tests.tiny import save_tiny_model, small_run, write_rows

MARK = "LOCKSTEP_FAULTS_MARK"
"""Environment variable of all processes of a Lab."""

LIMIT_S = 240.0
STEPS = 4
TEMPORARY = (".staging-*", ".replaced-*", ".pruned-*", "*.tmp", ".writable-*", "**/*.tmp")

NOT_COMPARED = ("trainer_state.json", "config.yaml", ".metadata")
"""Files of a checkpoint with timings or names of folders."""

SETTINGS = {
    "ppo": (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=10",
    ),
    "grpo": ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.dataloader_num_workers=1"),
    "filter_groups": (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        "trainer.save_freq=3",
        "trainer.val_before_train=false",
    ),
    "ray": (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=2",
        "trainer.val_before_train=false",
    ),
    "split": (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=2",
        "trainer.placement=split",
        "trainer.val_before_train=false",
    ),
    "agents": (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.agent.default_agent_loop={files}/loop.py:TwoTurns",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "data.max_response_length=60",
    ),
}
"""Configurations by name; {files} is the folder of the files that all runs read."""

LOOP = """\
from lockstep.agents.loops import AgentLoop

class TwoTurns(AgentLoop):
    async def run(self, conversation):
        await conversation.generate(stop_token_ids=range(259))
        if conversation.add([{"role": "user", "content": "again"}]):
            await conversation.generate(stop_token_ids=range(259))
"""

OWN_METRICS = (
    "time",
    "timing",
    "perf/",
    "training/restarts",
    "training/agent_workers",
    "training/rollout_repairs",
    "weight_sync/",
)
"""Metrics that each run has its own of."""

REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 3 == 0)
"""


@dataclass
class Ended:
    """A run that has ended.

    code: its exit code, negative for a signal, None if it did not end in time.
    left: processes that outlived it.
    hit:  whether the fault came while it was running.
    """

    code: int | None
    stderr: str
    left: list[str] = field(default_factory=list)
    hit: bool = True

    @cached_property
    def errors(self) -> list[str]:
        """Ray's core ends a program by itself if it loses its processes while it connects."""
        lines = self.stderr.splitlines()
        return [line for line in lines if line.startswith("error:") or "Failed to register worker to Raylet" in line]


class Lab:
    """Runs in folders under `folder`, one at a time; use it as a context manager.

    teardown: let the interpreter free all modules at the end of a run, as that of a user does.
    more:     further settings of all runs.
    """

    def __init__(self, folder: Path, teardown: bool = True) -> None:
        self.folder = folder.absolute()
        self.teardown = teardown
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        (self.folder / "files").mkdir(parents=True)
        save_tiny_model(self.folder / "files" / "model")
        write_rows(self.folder / "files" / "train.parquet", 16)
        write_rows(self.folder / "files" / "val.parquet", 4)
        (self.folder / "files" / "reward.py").write_text(REWARD)
        (self.folder / "files" / "loop.py").write_text(LOOP)
        self.more: tuple[str, ...] = ()
        # Ray keeps the logs of its sessions; paths of its sockets must be short
        self._ray_logs = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.variables = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": self._ray_logs.name,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
            MARK: self.mark,
        }
        self.run_variables: dict[str, str] = {}
        """Further environment variables of the next run."""
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Lab":
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.variables,
            start_new_session=True,  # Ctrl-C must not end the server before its runs
        )
        assert self._server.stdout is not None and self._server.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._server is not None and self._server.stdin is not None
        self.kill_left()
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._ray_logs.cleanup()

    def overrides(self, name: str, run_dir: Path) -> list[str]:
        return [
            *small_run(self.folder / "files"),
            "trainer.total_epochs=20",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=2",
            "trainer.test_freq=2",
            f"trainer.default_local_dir={run_dir}",
            *(setting.format(files=self.folder / "files") for setting in SETTINGS[name]),
            *self.more,
        ]

    def run(
        self,
        name: str,
        folder: Path,
        *,
        injection: Injection | None = None,
        disturb: Callable[["Running"], None] = lambda run: None,
        memory_mb: int | None = None,
        fresh: bool = False,
    ) -> Ended:
        """Run configuration `name` in `folder/run`. disturb: called once it is started. fresh: in a new interpreter."""
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        variables = {"TMPDIR": str(folder / "tmp")} | self.run_variables
        overrides = self.overrides(name, folder / "run")
        if fresh:
            return self._run_fresh(folder, overrides, variables)
        assert self._server is not None and self._server.stdin is not None and self._server.stdout is not None
        job = {
            "folder": str(folder),
            "variables": variables,
            "overrides": overrides,
            "injection": injection and asdict(injection),
            "memory_mb": memory_mb,
            "teardown": self.teardown,
        }
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        pid = json.loads(self._server.stdout.readline())["pid"]
        running = Running(pid, folder, self)
        disturb(running)
        ready, _, _ = select.select([self._server.stdout], [], [], LIMIT_S)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        code = json.loads(self._server.stdout.readline())["code"]
        hit = bool(running.signalled)
        if injection is not None:
            hit = len(Path(injection.log).read_text().splitlines()) >= injection.at
        return Ended(code if ready else None, (folder / "stderr.txt").read_text(), self._left_processes(), hit)

    def _run_fresh(self, folder: Path, overrides: list[str], variables: dict[str, str]) -> Ended:
        with open(folder / "stdout.txt", "w") as out:
            done = subprocess.run(
                [sys.executable, "-m", "lockstep.trainer.main_ppo", *overrides],
                cwd=folder,
                env=self.variables | variables,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                timeout=LIMIT_S,
            )
        return Ended(done.returncode, done.stderr, self._left_processes())

    def processes(self) -> dict[int, str]:
        """Process id to command line of all processes of runs."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        assert self._server is not None
        return {pid: line for pid, line in found.items() if line and pid != self._server.pid}

    def _left_processes(self) -> list[str]:
        """Command lines of processes that outlive their run; they are killed. Ray's own agents need a minute without a head."""
        begin = time.monotonic()
        while left := self.processes():
            waited_s = time.monotonic() - begin
            if waited_s > (90 if all("ray::" in line or "/ray/" in line for line in left.values()) else 10):
                break
            time.sleep(0.05)
        self.kill_left()
        return [f"process {pid}: {line[:120]}" for pid, line in left.items()]

    def kill_left(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@dataclass(frozen=True)
class Running:
    """A run that has been started."""

    pid: int
    folder: Path
    lab: Lab
    signalled: list[int] = field(default_factory=list)

    def is_alive(self) -> bool:
        try:
            return "Z" not in Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False

    def find(self, text: str, limit_s: float = LIMIT_S) -> int | None:
        """A process of the run whose command line has `text`; waits for it, None if the run ends before."""
        end = time.monotonic() + limit_s
        while self.is_alive() and time.monotonic() < end:
            for pid, line in self.lab.processes().items():
                if text in line and pid != self.pid:
                    return pid
            time.sleep(0.01)
        return None

    def wait_for(self, pattern: str) -> bool:
        """Wait until a path that matches appears in the folder; False if the run ends before."""
        while not list(self.folder.glob(pattern)):
            if not self.is_alive():
                return False
            time.sleep(0.005)
        return True

    def kill(self, pid: int | None, number: int = signal.SIGKILL) -> None:
        if pid is None or not self.is_alive():
            return
        try:
            os.kill(pid, number)
            self.signalled.append(pid)
        except ProcessLookupError:
            pass


def result(run_dir: Path) -> dict[str, Any]:
    """What a finished run must have in common with the undisturbed one.

    Checksums of the last checkpoint's files (weights, optimizer, random states, loader state), and all metrics except timings.
    """
    manifest = json.loads((run_dir / f"global_step_{STEPS}" / "manifest.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # its processes do not seed Python's `random`; a separate rollout is on Ray too
    is_on_ray = "actor/extra_rank_1.json" in manifest["files"] or "weight_sync/gb" in rows[-1]
    files = {
        name: entry["sha256"]
        for name, entry in manifest["files"].items()
        if Path(name).name not in NOT_COMPARED and not (is_on_ray and "extra_rank" in name)
    }
    untimed = [{key: value for key, value in row.items() if not key.startswith(OWN_METRICS)} for row in rows]
    if any("num_turns/mean" in row for row in rows):  # the last bits depend on which requests were decoded together
        untimed = [{k: v for k, v in row.items() if not k.startswith("training/rollout_")} for row in untimed]
    return {"files": files, "metrics": untimed}


def difference(ours: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first difference, or an empty string."""
    for name in sorted({*ours["files"], *expected["files"]}):
        if ours["files"].get(name) != expected["files"].get(name):
            return f"{name} differs"
    steps, expected_steps = ([row["step"] for row in rows["metrics"]] for rows in (ours, expected))
    if steps != expected_steps:
        return f"metrics.jsonl has steps {steps}, not {expected_steps}"
    for row, other in zip(ours["metrics"], expected["metrics"]):
        names = [name for name in sorted({*row, *other}) if row.get(name) != other.get(name)]
        if names:
            return f"step {row['step']}: {names[0]} is {row.get(names[0])}, not {other.get(names[0])}"
    return ""


def leftovers(folder: Path) -> list[str]:
    """Temporary files and locks that a stopped or finished run has left."""
    found = [str(path.relative_to(folder)) for pattern in TEMPORARY for path in (folder / "run").glob(pattern)]
    found += [f"tmp/{path.name}" for path in (folder / "tmp").iterdir()]
    lock = folder / "run" / ".run.lock"
    if lock.exists():
        with open(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append("run/.run.lock is locked")
    return found


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
