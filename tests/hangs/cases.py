"""The kinds of hangs, and the culprit of each."""

import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.engines.rollout.fake_server import fake_servers
from tests.faults.runs import Ended, Running, remove
from tests.hangs.plants import FOLDER, How, Plant, begin, num_steps
from tests.hangs.runs import ROLLOUT, STEPS, USER, HangLab, pid_of
from tests.judge_server import Answer, JudgeServer, verdict

SLACK_S = 25.0
"""From the deadline to the report on a busy machine, which collects the stacks of all processes first."""
MAX_DEADLINE_S = 12.0
"""A phase's deadline is learnt: 4 times its longest pause, which is below 3 s on any machine that runs the tests."""

LONG = ("reward_model.timeout_s=600",)
SHIM = ("actor_rollout_ref.model.external_lib=tests.hangs.shim",)
SFT_SHIM = ("model.external_lib=tests.hangs.shim",)
LOADER = (f"data.custom_cls.path={USER}/rows.py", "data.custom_cls.name=Rows")
ASYNC_TOOL = (f"{ROLLOUT}.multi_turn.function_tool_path={USER}/async_tools.py",)

NAMES = (
    "compute_score",
    "judge_with_care",
    "look_up",
    "ask_around",
    "teacher",
    "program.py",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "data loader",
    "metrics.jsonl",
    "global_step",
    "agent worker",
    "actor_rollout rank 0",
    "actor_rollout rank 1",
    "rollout thread",
)
"""Everything that a verdict could blame, by a text in its name; the verdict of a case has none but the culprit's own."""


@dataclass(frozen=True)
class Case:
    """One hang. step: in which it begins."""

    kind: str
    config: str
    step: int

    def __str__(self) -> str:
        return f"{self.kind} in {self.config} at step {self.step}"


@dataclass(frozen=True)
class Kind:
    """A kind of hang.

    plant:    what hangs; its step is the case's.
    configs:  configurations that it is planted in.
    culprit:  texts of the first line of the verdict; {pid} is the process that hangs.
    also:     names that may be in the verdict too.
    phase:    what is stuck: one of these.
    stack:    a line of the report; empty for processes that are stopped.
    settings: of the run.
    service:  runs during the run; yields further settings.
    stop:     name of the process that is stopped by SIGSTOP.
    """

    plant: Plant
    configs: tuple[str, ...]
    culprit: tuple[str, ...]
    phase: tuple[str, ...]
    also: tuple[str, ...] = ()
    stack: str = "in hang_here"
    settings: tuple[str, ...] = ()
    service: Callable[[HangLab, Path, int], "contextmanager[tuple[str, ...]]"] | None = None  # type: ignore[valid-type]
    stop: str = ""


@dataclass(frozen=True)
class Outcome:
    """code: exit code. seconds: from the beginning of the hang to its report. problem: empty if everything holds."""

    case: Case
    code: int | None
    seconds: float
    verdict: str
    problem: str

    def __str__(self) -> str:
        return "failed" if self.problem else "named"


class Bench:
    def __init__(self, lab: HangLab) -> None:
        self.lab = lab

    def run(self, case: Case) -> Outcome:
        kind = KINDS[case.kind]
        folder = self.lab.folder / "case"
        remove(folder)
        folder.mkdir()
        plant = replace(kind.plant, step=case.step)
        with ExitStack() as services:
            settings = kind.settings
            if kind.service is not None:
                settings += services.enter_context(kind.service(self.lab, folder, case.step))
            plant = replace(plant, url=self.lab.url)
            ended = self.lab.train(case.config, folder, plant, settings, _stopper(kind, case, folder))
        planted = folder / "planted.json"
        if not planted.exists():
            return Outcome(case, ended.code, 0.0, "", f"nothing hung; exit code {ended.code}: {_tail(ended)}")
        began = json.loads(planted.read_text())
        written = [path.stat().st_mtime for path in (folder / "run" / "hangs").glob("*.txt")]
        seconds = min(written, default=time.time()) - began["time"]
        found = verdict_of(folder)
        problem = _wrong(case, kind, ended, folder, began["pid"], seconds)
        return Outcome(case, ended.code, seconds, found[0] if found else "", problem)


def reports(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted((folder / "run" / "hangs").glob("*.txt"))]


def verdict_of(folder: Path) -> list[str]:
    """The lines of the first report's verdict."""
    found = reports(folder)
    section = re.search(r"^Who is stuck\n-+\n(.*?)\n\n", found[0] if found else "", re.M | re.S)
    return section[1].splitlines() if section else []


def _wrong(case: Case, kind: Kind, ended: Ended, folder: Path, pid: int, seconds: float) -> str:
    """The first thing that does not hold; empty if everything does."""
    if ended.code != 3 and not (case.config == "torchrun" and re.search(r"exitcode\s*: 3", ended.stderr)):
        return f"exit code {ended.code}: {_tail(ended)}"
    if seconds > MAX_DEADLINE_S + SLACK_S:
        return f"it took {seconds:.0f} s"
    lines = verdict_of(folder)
    if not lines:
        return f"no report: {_tail(ended)}"
    expected = [text.format(pid=pid) for text in kind.culprit]
    for text in expected:
        if text not in lines[0]:
            return f"the verdict does not name {text!r}: {' / '.join(lines)}"
    allowed = " ".join([*expected, *kind.also])
    for line in lines:
        if "waits for it" in line:
            continue
        blamed = line.partition(", says ")[0]  # after it comes the process that waits
        for name in NAMES:
            if name in blamed and name not in allowed:
                return f"the verdict names {name!r}: {' / '.join(lines)}"
    report = reports(folder)[0]
    header = report.splitlines()[0]
    if not any(phase in header for phase in kind.phase):
        return f"the phase is not one of {kind.phase}: {header}"
    if kind.stack and kind.stack not in report:
        return f"the report has no stack with {kind.stack!r}"
    if ended.left:
        return f"left behind: {'; '.join(ended.left)}"
    return ""


def _tail(ended: Ended) -> str:
    return " / ".join(ended.stderr.strip().splitlines()[-4:])


def wait_for_step(run: Running, step: int) -> bool:
    """Wait until a step has begun; False if the run ends before."""
    while num_steps(run.folder) < step - 1:
        if not run.is_alive():
            return False
        time.sleep(0.01)
    return True


def _stopper(kind: Kind, case: Case, folder: Path) -> Callable[[Running], None]:
    def stop(run: Running) -> None:
        if kind.stop and wait_for_step(run, case.step):
            pid = pid_of(folder, kind.stop)
            begin(folder, pid)
            os.kill(pid, signal.SIGSTOP)

    return stop


@contextmanager
def _silent_port(lab: HangLab, folder: Path, step: int) -> Iterator[tuple[str, ...]]:
    """Accepts connections and never answers; the plant gets its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        lab.url = f"http://127.0.0.1:{listening.getsockname()[1]}/look_up"
        yield ()


@contextmanager
def _judge(lab: HangLab, folder: Path, step: int) -> Iterator[tuple[str, ...]]:
    """A judge that answers no request from `step` on."""

    def answer(body: object, number: int) -> Answer:
        if num_steps(folder) < step - 1:
            return verdict(number % 10)
        begin(folder, os.getpid())
        return replace(verdict(5), delay_s=120.0)

    with JudgeServer(answer).running() as judge:
        settings = ("enable=true", f"base_url={judge.url}", "model=critic-9b", "timeout_s=600", "cache=false")
        yield (*(f"reward_model.judge.{setting}" for setting in settings), "custom_reward_function.path=null")


@contextmanager
def _rollout_server(lab: HangLab, folder: Path, step: int) -> Iterator[tuple[str, ...]]:
    """A rollout server that answers no request for tokens from `step` on."""
    with fake_servers("vllm", stall_s=120.0) as (server,):
        generate = server.state.faults

        class Faults(type(generate)):  # type: ignore[misc]
            def __len__(self) -> int:
                return 1 if num_steps(folder) >= step - 1 else 0

            def popleft(self) -> str:
                begin(folder, os.getpid())
                return "stall"

        server.state.faults = Faults()
        yield (f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[{server.url}]", *SHIM)


@contextmanager
def _mcp(lab: HangLab, folder: Path, step: int) -> Iterator[tuple[str, ...]]:
    environment = lab.variables | {FOLDER: str(folder)}
    names = ("PYTHONPATH", "PATH", FOLDER, *(name for name in environment if name.startswith("LOCKSTEP_FAULTS")))
    server = {
        "command": "python",
        "args": [f"{USER}/mcp_server.py"],
        "env": {name: environment[name] for name in names},
    }
    entry = {"class_name": "mcp", "config": {"type": "mcp"}, "mcp": {"servers": {"library": server}}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    multi_turn = f"{ROLLOUT}.multi_turn"
    yield (f"{multi_turn}.tool_config_path={folder}/tools.yaml", f"{multi_turn}.function_tool_path=null")


@contextmanager
def _teacher(lab: HangLab, folder: Path, step: int) -> Iterator[tuple[str, ...]]:
    entry = {"name": "teacher", "class_name": f"{USER}/teacher.py:Teacher"}
    (folder / "teacher.yaml").write_text(json.dumps({"interaction": [entry]}))
    rows = lab.folder / "files" / "talks.parquet"
    yield (
        f"{ROLLOUT}.multi_turn.interaction_config_path={folder}/teacher.yaml",
        f"{ROLLOUT}.multi_turn.function_tool_path=null",
        f"{ROLLOUT}.agent.default_agent_loop={USER}/loops.py:TalksToTeacher",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
    )


def _reward(how: How, *configs: str, settings: tuple[str, ...] = (), **changes: object) -> Kind:
    culprit = ("the reward", "user/reward.py:compute_score", "row ")
    kind = Kind(Plant("reward", how), configs, culprit, ("rewards", "generate", "validation"), settings=settings)
    return replace(kind, **changes)  # type: ignore[arg-type]


def _tool(where: str, how: How, name: str, *configs: str, **changes: object) -> Kind:
    kind = Kind(Plant(where, how), configs, (f"the tool {name}",), ("generate", "validation"))
    return replace(kind, **changes)  # type: ignore[arg-type]


def _method(name: str, how: How, phase: str, *configs: str) -> Kind:
    culprit = ("actor_rollout rank 1 (pid {pid}", name)
    return Kind(Plant(f"method:{name}", how, rank=1), configs, culprit, (phase,), settings=SHIM)


def _stopped(name: str, *configs: str, settings: tuple[str, ...] = SHIM) -> Kind:
    rank = name.replace("_", " ")
    own = Kind(Plant("none"), configs, (f"{rank} (pid {{pid}}",), ("",), stack="", settings=settings, stop=name)
    return replace(own, also=(f"actor_rollout {rank}",))


def _write(where: str, name: str, phase: str, *configs: str, settings: tuple[str, ...] = SHIM, rank: int = 0) -> Kind:
    return Kind(Plant(where, rank=rank), configs, ("the file", name), (phase,), settings=settings)


ASYNC = ("colocated", "one_step_off", "fully_async")
IN_WORKER = ("pid {pid}",)

KINDS: dict[str, Kind] = {
    "reward in an endless loop": _reward(
        "loop",
        "local",
        *ASYNC,
        # it takes Python's lock from the update, which may be late first
        phase=("rewards", "generate", "validation", "update actor"),
    ),
    "reward in an endless loop, in a worker process": _reward("loop", "local", "fully_async", "ray", settings=LONG),
    "reward that blocks in C": _reward("sleep", "local", "one_step_off", "agents", "ray"),
    "reward that blocks in C, in a worker process": _reward("sleep", "local", "colocated", settings=LONG),
    "coroutine reward that never ends": _reward(
        "await",
        "local",
        "fully_async",
        settings=(*LONG, "custom_reward_function.name=judge_with_care"),
        culprit=("the reward", "user/reward.py:judge_with_care"),
        stack="",
    ),
    "reward with a deadlock": _reward("lock", "local", "colocated"),
    "reward that writes to a full pipe": _reward("pipe", "local", "one_step_off"),
    "reward whose child does not read": _reward("child", "local", "fully_async", settings=LONG),
    "stopped reward worker": _reward("sleep", "local", "colocated", settings=LONG, stop="reward", stack="is stopped"),
    "judge that never answers": Kind(
        Plant("judge"),
        ("local", "fully_async", "ray"),
        ("the judge http://127.0.0.1:", "/v1/chat/completions", "critic-9b"),
        ("rewards", "generate", "validation"),
        stack="",
        settings=LONG,
        service=_judge,
    ),
    "tool that never returns": _tool(
        "tool", "sleep", "look_up", "agents", "agent workers", "async agent workers", "ray agent workers"
    ),
    "tool in an endless loop": _tool("tool", "loop", "look_up", "agents", "agent workers"),
    "coroutine tool that never ends": _tool(
        "async tool", "await", "ask_around", "agents", "agent workers", settings=ASYNC_TOOL, stack=""
    ),
    "tool whose server never answers": _tool(
        "tool", "http", "look_up", "agents", "agent workers", service=_silent_port
    ),
    "MCP server that never answers": _tool(
        "mcp", "sleep", "look_up of MCP server library", "agents", "agent workers", service=_mcp, stack=""
    ),
    "interaction that hangs": Kind(
        Plant("interaction", "await"),
        ("agents", "async agent workers"),
        ("the interaction teacher",),
        ("generate", "validation"),
        stack="",
        service=_teacher,
    ),
    "program that never ends": Kind(
        Plant("program"),
        ("agents", "agent workers"),
        ("the program ", "user/program.py"),
        ("generate", "validation"),
        stack="",
        settings=(
            f"{ROLLOUT}.agent.default_agent_loop=program_agent",
            f"{ROLLOUT}.agent.program.command=[python,{USER}/program.py]",
            f"{ROLLOUT}.agent.program.timeout_s=600",
            f"{ROLLOUT}.multi_turn.function_tool_path=null",
        ),
    ),
    "agent loop that blocks its worker": Kind(
        Plant("loop"),
        ("agent workers", "async agent workers"),
        ("agent worker ", "pid {pid}", "in hang_here"),
        ("generate", "validation"),
    ),
    "stopped agent worker": Kind(
        Plant("none"),
        ("agent workers", "async agent workers", "ray agent workers"),
        ("agent worker ", "pid {pid}"),
        ("generate", "validation"),
        stack="",
        stop="agent",
    ),
    "rollout server that never answers": Kind(
        Plant("server"),
        ("local", "colocated"),
        ("the server http://127.0.0.1:", "/inference/v1/generate"),
        ("generate", "validation"),
        stack="",
        service=_rollout_server,
    ),
    "data-loader process that hangs": Kind(
        Plant("loader process"),
        ("local", "agents", "ray"),
        ("the data loader Rows, process 0 of 1 (pid {pid})",),
        ("read a batch", "generate"),
        settings=(*LOADER, "data.dataloader_num_workers=1"),
    ),
    "dataset that hangs": Kind(
        Plant("dataset"),
        ("local", "fully_async"),
        ("the data loader Rows",),
        ("read a batch", "generate"),
        settings=LOADER,
    ),
    "stopped rank": _stopped("rank_1", "ray"),
    "stopped worker": _stopped("rank_0", "ray fully_async"),
    "torchrun: stopped rank": _stopped("rank_1", "torchrun", settings=SFT_SHIM),
    "rank that hangs before a collective": _method("update_actor", "sleep", "update actor", "ray"),
    "rank that hangs in generation": _method("generate_sequences", "loop", "generate", "ray"),
    "rank with a deadlock": _method("save_checkpoint", "lock", "save checkpoint", "ray"),
    "collective that one rank skips": Kind(
        Plant("skip:update_actor", rank=1),
        ("ray",),
        ("actor_rollout rank 1 (pid {pid}", "is not in the collective"),
        ("update actor",),
        stack="in barrier",
        settings=SHIM,
    ),
    "stalled write of a checkpoint": _write(
        "fsync:global_step", "global_step", "save checkpoint", "local", "colocated"
    ),
    "Ray: stalled write of a checkpoint": replace(
        _write("fsync:global_step", "global_step", "save checkpoint", "ray", rank=1), also=("actor_rollout rank 1",)
    ),
    "stalled write of metrics.jsonl": _write("metrics", "metrics.jsonl", "log metrics", "local", "colocated", "agents"),
    "stalled write of rollouts": _write(
        "fsync:dumps", "dumps", "write rollouts", "local", settings=(*SHIM, "trainer.rollout_data_dir=dumps")
    ),
    "deadlocked rollout thread": Kind(
        Plant("function:lockstep.trainer.ppo.rollout_sources.background:BackgroundRollout._take", "lock"),
        ASYNC,
        ("controller (pid {pid}", "in hang_here"),
        ("generate",),
        settings=SHIM,
    ),
    "deadlocked controller": Kind(
        Plant("function:lockstep.trainer.ppo.ray_trainer:add_advantages", "lock"),
        ("local", "fully_async"),
        ("controller (pid {pid}", "in hang_here"),
        ("advantages",),
        settings=SHIM,
    ),
    "torchrun: rank that hangs before a collective": Kind(
        Plant("function:lockstep.engines.train.fsdp:FsdpEngine.optimizer_step", "sleep", rank=1),
        ("torchrun",),
        ("rank 1 (pid {pid}",),
        ("",),
        settings=SFT_SHIM,
    ),
}


def plan(count: int, seed: int, kind: str = "", config: str = "") -> list[Case]:
    """Every kind, then its other configurations, then the same at later steps; in random order.

    kind, config: texts in the names of those that are wanted.
    """
    chance = random.Random(seed)
    wanted = [name for name in KINDS if kind in name]
    places = [(name, where) for name in wanted for where in KINDS[name].configs if config in where]
    chance.shuffle(places)
    firsts = {name: (name, where) for name, where in places}
    rest = [place for place in places if place not in firsts.values()]
    cases = [Case(name, where, step) for step in range(2, STEPS) for name, where in [*firsts.values(), *rest]][:count]
    chance.shuffle(cases)
    return cases
