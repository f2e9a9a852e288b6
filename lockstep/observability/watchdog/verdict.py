"""Who is stuck: decides from what all processes say, with a pure function.

    a process that does not answer
    ranks that are not in the collective in which others of their role wait
    what the stuck thread, or a worker, waits for: a reward, a tool, a judge, a server, a data loader, a file
    the worker whose call does not end
    the controller, and where it is

The first of these that applies is named first. Who waits for another one is never named before it.
"""

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.observability.watchdog.reporters import Dump
from lockstep.utils.heartbeat import CONTROLLER, STOPPED, Frame, PhaseState, ProcessState, Stack, WaitState
from lockstep.utils.progress import PASSIVE
from lockstep.utils.timing import PHASES

COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/", "/megatron/core/tensor_parallel/mappings.py")
"""Files whose functions wait for other ranks."""
COLLECTIVE_DEPTH = 6
"""Innermost frames in which such a file means that the thread waits: below it there are only torch's operators."""
WORKER_PHASES = frozenset({*PHASES.values(), "reward model", "load models", "load the model"}) - {
    "advantages",
    "write rollouts",
}
"""Phases in which the controller waits for calls of workers."""
IDLE = {("agent_worker.py", "all_messages"), ("message_process.py", "_forward")}
"""File and function in which threads of agent workers wait for messages."""
IDLE_FILES = ("/selectors.py", "/queue.py", "/concurrent/futures/thread.py")
"""Where a thread waits for work."""
MAX_NAMED = 4

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Seen:
    """A process at the time of the verdict. silent_s: since its last heartbeat."""

    state: ProcessState
    silent_s: float = 0.0
    dump: Dump = field(default_factory=Dump)

    @property
    def who(self) -> str:
        return f"{self.state.name} (pid {self.state.pid}, {self.state.host})"


@dataclass(frozen=True)
class Stuck:
    """The phases that do not move on.

    phases:     of one thread of the controller, outermost first.
    thread:     its id.
    pause_s:    since the last sign of progress.
    deadline_s: that has passed.
    """

    phases: Sequence[PhaseState]
    thread: int
    pause_s: float
    deadline_s: float

    @property
    def phase(self) -> str:
        return str(self.phases[-1])


@dataclass(frozen=True)
class Culprit:
    """who: a process, or what it waits for. why: the rest of the sentence."""

    who: str
    why: str
    process: Seen

    def __str__(self) -> str:
        return f"{self.who} {self.why}"


def culprits(stuck: Stuck, processes: Sequence[Seen]) -> list[Culprit]:
    """Whom to blame, most likely first. processes: the controller's first."""
    controller, workers = processes[0], [p for p in processes if p.state.role != CONTROLLER]
    if silent := [process for process in workers if not process.dump.answers]:
        return [Culprit(process.who, _silence(process), process) for process in silent]
    if absent := _absent_ranks(workers):
        return absent
    if own := _waits(controller, stuck, own=True):
        return own
    busy = [process for process in workers if process.state.calls]
    if stuck.phases[-1].name in WORKER_PHASES:
        if busy:
            return [Culprit(process.who, _doing(process), process) for process in busy]
    elif waits := [wait for process in (*workers, controller) for wait in _waits(process, stuck)]:
        return waits
    if awaited := _awaited(controller, workers):
        return [Culprit(process.who, _doing(process), process) for process in awaited]
    if busy:
        return [Culprit(process.who, _doing(process), process) for process in busy]
    stack = _awaited_thread(controller, stuck) or next(
        (s for s in controller.dump.stacks if s.ident == stuck.thread), None
    )
    return [Culprit(controller.who, _doing(controller, stack), controller)]


def sentence(found: Sequence[Culprit]) -> str:
    more = f" (and {len(found) - MAX_NAMED} more)" if len(found) > MAX_NAMED else ""
    return "; ".join(map(str, found[:MAX_NAMED])) + more


def in_collective(stacks: Sequence[Stack]) -> bool:
    """Whether a thread waits for other ranks."""
    return any(_is_collective(stack) for stack in stacks)


def _is_collective(stack: Stack) -> bool:
    frames = [frame for frame in stack.frames[:COLLECTIVE_DEPTH] if "/torch/distributed/elastic/" not in frame[0]]
    for file, _, _ in frames:
        if any(name in file for name in COLLECTIVES):
            return True
        if not file.startswith(_LIBRARIES):  # this code runs outside of the collective
            return False
    return False


def _absent_ranks(workers: Sequence[Seen]) -> list[Culprit]:
    """Ranks outside of the collective in which others wait, then these; empty if no rank is in one."""
    waiting = [process for process in workers if in_collective(process.dump.stacks)]
    if not waiting:
        return []
    roles = {process.state.role for process in waiting}
    absent = [process for process in workers if process not in waiting]
    absent = [p for p in absent if p.state.role in roles] or [p for p in absent if p.state.calls]
    if not absent:
        return [Culprit(p.who, f"waits in a collective{_in_call(p)}{_at(p.dump.stacks)}", p) for p in waiting]
    found = [Culprit(p.who, f"is not in the collective: it {_doing(p)}", p) for p in absent]
    return found + [Culprit(p.who, f"waits for it{_in_call(p)}", p) for p in waiting]


def _waits(process: Seen, stuck: Stuck, own: bool = False) -> list[Culprit]:
    """What the process has waited for since the last sign of progress. own: only the stuck thread."""
    found = [wait for wait in process.state.waits if wait.kind not in PASSIVE]
    found = [wait for wait in found if process.state.now - wait.began >= 0.5 * stuck.pause_s]
    found = [wait for wait in found if not own or wait.thread == stuck.thread]
    return [Culprit(f"the {wait.kind} {wait.name}", f"has {_since(wait, process)}", process) for wait in found]


def _since(wait: WaitState, process: Seen) -> str:
    seconds = process.state.now - wait.began
    verb = {"file": "been written or read", "data loader": "given no batch"}.get(wait.kind, "not answered")
    stopped = (
        ": its process is stopped (SIGSTOP, or a debugger)" if process.dump.awaited.get(wait.name) == STOPPED else ""
    )
    return f"{verb} for {seconds:.0f} s{stopped}, says {process.who}"


def _awaited(controller: Seen, workers: Sequence[Seen]) -> list[Seen]:
    """Processes that the controller waits for by name, such as "agent worker 1 of 4"."""
    names = {wait.name.partition(" of ")[0] for wait in controller.state.waits if wait.kind == "worker"}
    return [process for process in workers if f"{process.state.role} {process.state.rank}" in names]


def _awaited_thread(controller: Seen, stuck: Stuck) -> Stack | None:
    """The thread that the stuck one waits for by name, such as "rollout thread, take"; None if it is idle."""
    waits = [wait for wait in controller.state.waits if wait.kind == "queue" and wait.thread == stuck.thread]
    names = [wait.name.partition(" thread")[0] for wait in waits]
    return next((s for s in controller.dump.stacks if s.thread in names and any(map(is_own_code, s.frames))), None)


def _silence(process: Seen) -> str:
    if process.dump.is_stopped:
        return "does not answer: the process is stopped (SIGSTOP, or a debugger)"
    return f"does not answer for {process.silent_s:.0f} s{_in_call(process)}{_at(process.dump.stacks)}"


def _doing(process: Seen, stack: Stack | None = None) -> str:
    state = process.state
    if waits := [wait for wait in state.waits if wait.kind not in PASSIVE] if stack is None else []:
        return f"waits for the {waits[0].kind} {waits[0].name} for {state.now - waits[0].began:.0f} s"
    at = _at(process.dump.stacks if stack is None else [stack])
    if state.calls:
        return f"is{_in_call(process)}{at}"
    if state.last_call is not None and stack is None:
        return f"has finished {state.last_call}, and has no other call"
    return f"is{at}" if at else "does not say where it is"


def _in_call(process: Seen) -> str:
    return f" in {process.state.calls[-1]}" if process.state.calls else ""


def _at(stacks: Sequence[Stack]) -> str:
    """The innermost line outside of libraries of the first thread that has one, and what it calls there; idle threads come last."""
    for stack in sorted(stacks, key=_is_idle):
        place = next((frame for frame in stack.frames if is_own_code(frame)), None)
        if place is not None and (os.path.basename(place[0]), place[2]) not in IDLE:
            inner = stack.frames[0]
            inside = "" if inner == place else f" (in {inner[2]})"
            return f" at {place[0]}:{place[1]} in {place[2]}{inside}"
    return ""


def _is_idle(stack: Stack) -> bool:
    """Whether the thread is one of an event loop or a pool that has nothing to do."""
    return any(frame[0].endswith(IDLE_FILES) for frame in stack.frames[:2])


def is_own_code(frame: Frame) -> bool:
    """Whether the frame is Lockstep's or the user's, not of a library."""
    return not frame[0].startswith(("<", *_LIBRARIES)) and f"{os.sep}site-packages{os.sep}" not in frame[0]
