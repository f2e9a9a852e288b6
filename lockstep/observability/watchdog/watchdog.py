"""The thread of the controller that notices when a run is stuck.

    phases of this process ─┐                                     ┌─► one log line, RUN/hangs/<time>_<phase>.txt
    heartbeats of workers  ─┼─► signs of progress ─► deadlines ───┤
                            │   per thread           per phase    └─► on_hang: stop or restart
    waits of all processes ─┴─► slow: one log line

A sign of progress is a phase or a worker's call that begins or ends, a count that changes, or a wait that ends. Time during which
this process itself was stopped does not count.
"""

import logging
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.watchdog import BETWEEN, HEARTBEAT, WatchdogConfig
from lockstep.observability.run_folder import HANGS
from lockstep.observability.watchdog.deadlines import Deadlines
from lockstep.observability.watchdog.report import report_name, report_text
from lockstep.observability.watchdog.reporters import Dump, Reporters, py_spy
from lockstep.observability.watchdog.slow import SlowWaits
from lockstep.observability.watchdog.verdict import Culprit, Seen, Stuck, culprits, sentence
from lockstep.utils import heartbeat, spans
from lockstep.utils.heartbeat import CONTROLLER, POLLS, PhaseState, ProcessState

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_TICK_S = 5.0
"""A longer time between two looks means that this process was stopped, or that the machine slept."""
SILENT_S = 10.0
"""A process that was not heard for longer does not answer."""
MAX_HEARTBEAT_DEADLINE_S = 60.0
OWN_PHASES = ("rewards", "advantages", "read the data")
"""Phases that wait for no worker: what workers do meanwhile is no progress of them."""
DEBUGGER_RETRY_S = 60.0
"""How long a debugger is left alone before the next look at the stacks."""
MAX_LISTED = 256
"""Processes in `status.json`; those that are silent for longest, if there are more."""
WRITE_TIMEOUT_S = 5.0
"""How long a report or a log line may take, if the disk or the console is what hangs."""


@dataclass
class _Thread:
    """The phases of one thread. sign: what has to change; since: when it last did; is_debugged: a debugger held it meanwhile."""

    phases: list[PhaseState]
    sign: Hashable
    since: float
    next_report_s: float = 0.0
    is_debugged: bool = False

    @property
    def names(self) -> list[str]:
        return [phase.name for phase in self.phases]


class Watchdog:
    """Context manager around a run, entered by the run's thread.

    folder:  of the run.
    host:    address at which the processes of the run reach this one.
    role:    of this process.
    on_hang: called with the verdict after the report; None goes on waiting.
    deadlines: what earlier watchdogs of the command have learnt.
    stuck:   the verdict, while the run is stuck.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        folder: Path,
        host: str = "127.0.0.1",
        role: str = CONTROLLER,
        on_hang: Callable[[str, list[Culprit]], None] | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.role = role
        self.stuck: str | None = None
        self.reporters = Reporters(host)
        self._on_hang = on_hang
        self._deadlines = deadlines or Deadlines(config)
        self._own: ProcessState | None = None
        """Of the last look."""
        self._slow = SlowWaits()
        self._threads: dict[int, _Thread] = {}
        self._run_thread = 0
        self._has_failed = False
        self._ticked = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._run_thread = threading.get_ident()
        self.reporters.__enter__()
        heartbeat.set_link(self.reporters.link)
        self._ticked = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        heartbeat.set_link(None)
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * WRITE_TIMEOUT_S)
        self.reporters.__exit__(*exc)

    def status(self) -> dict[str, Any]:
        """For `status.json`: the processes that report, and the verdict if the run is stuck."""
        now = time.monotonic()
        own = self._own or heartbeat.process_state(self.role)
        reporters = self.reporters.all()
        if len(reporters) > MAX_LISTED:
            reporters.sort(key=lambda reporter: reporter.heard)
        states = [(own, max(0.0, now - own.now - INTERVAL_S))]
        states += [(reporter.state, now - reporter.heard) for reporter in reporters[:MAX_LISTED]]
        workers = [
            {
                "role": state.role,
                "rank": state.rank,
                "pid": state.pid,
                "host": state.host,
                "phase": "; ".join([*(str(phases[-1]) for phases in state.phases), *state.calls])[:200],
                "waits": [f"{wait.kind} {wait.name}"[:100] for wait in state.waits[:3]],
                "heartbeat_s": round(silent_s, 1),
            }
            for state, silent_s in states
        ]
        return {"workers": workers, "stuck": self.stuck}

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            try:
                self.look(time.monotonic())
            except Exception:  # noqa: BLE001 - the run must not suffer
                if not self._has_failed:
                    _bounded(partial(logger.warning, "the watchdog failed: %s", traceback.format_exc()))
                self._has_failed = True

    def look(self, now: float) -> None:
        """Note signs of progress, and report what is stuck."""
        gap_s = now - self._ticked
        self._ticked = now
        if gap_s > MAX_TICK_S:
            self.reporters.forgive(gap_s)
            for thread in self._threads.values():
                thread.since += gap_s
            return
        self._own = own = heartbeat.process_state(self.role)
        workers = self.reporters.all()
        moves = (own.num_moves, *(_sign(reporter.state) for reporter in workers))
        for line in self._slow.look([own, *(reporter.state for reporter in workers)], now):
            _bounded(partial(logger.warning, "%s", line))
        self._note(moves, own, now)
        stuck = [
            (thread, found) for number, thread in self._threads.items() if (found := self._judge(number, thread, now))
        ]
        for thread, found in sorted(stuck, key=lambda item: -item[1].pause_s)[:1]:
            self._report(thread, found)
        if self.stuck is not None and not any(thread.next_report_s for thread in self._threads.values()):
            _bounded(lambda: logger.warning("the run goes on, after it was stuck: %s", self.stuck))
            self.stuck = None

    def _note(self, moves: Hashable, own: ProcessState, now: float) -> None:
        threads = heartbeat.phases_by_thread()
        threads.setdefault(self._run_thread, [])
        for gone in self._threads.keys() - threads.keys():
            del self._threads[gone]
        for number, phases in threads.items():
            sign: tuple[Hashable, ...] = tuple((phase.name, phase.began, phase.done) for phase in phases)
            # others may write files all the time, such as copies of checkpoints
            files = frozenset((w.name, w.began) for w in own.waits if w.kind == "file" and w.thread == number)
            sign += (own.waits_sign, files)
            if not phases or phases[-1].name not in OWN_PHASES:
                sign += (moves,)
            before = self._threads.get(number)
            phases = phases or [PhaseState(BETWEEN, now)]
            if before is None:
                self._threads[number] = _Thread(phases, sign, now)
                continue
            if sign != before.sign:
                if not before.is_debugged:
                    self._deadlines.paused(before.names, now - before.since)
                before.sign, before.since, before.next_report_s, before.is_debugged = sign, now, 0.0, False
            elif not before.is_debugged:
                before.is_debugged = heartbeat.is_thread_debugged(number)
            before.phases = phases

    def _judge(self, number: int, thread: _Thread, now: float) -> Stuck | None:
        """What is stuck and was not reported yet."""
        pause_s = now - thread.since
        deadline_s = self._deadlines.of(thread.names)
        if deadline_s > (least_s := self._heartbeat_deadline_s()) and self._stopped(now, least_s):
            deadline_s = least_s
        if pause_s < max(deadline_s, thread.next_report_s):
            return None
        return Stuck(thread.phases, number, pause_s, deadline_s)

    def _heartbeat_deadline_s(self) -> float:
        fallback = min(MAX_HEARTBEAT_DEADLINE_S, self.config.min_deadline_s)
        return self.config.deadlines_s.get(HEARTBEAT, fallback)

    def _stopped(self, now: float, silent_s: float) -> bool:
        """Whether a process of this machine is stopped and was silent for so long."""
        silent = [r for r in self.reporters.all() if now - r.heard > silent_s and r.is_here]
        return any(heartbeat.is_stopped(reporter.state.pid) for reporter in silent)

    def _report(self, thread: _Thread, stuck: Stuck) -> None:
        processes = self._seen()
        if any(heartbeat.is_debugged(stack.frames) for process in processes for stack in process.dump.stacks):
            thread.is_debugged = True
            thread.next_report_s = stuck.pause_s + DEBUGGER_RETRY_S
            return
        thread.next_report_s = 2 * stuck.pause_s
        found = culprits(stuck, processes)
        self.stuck = (
            f"no progress in {stuck.phase!r} for {stuck.pause_s:.0f} s (deadline {stuck.deadline_s:.0f} s): "
            f"{sentence(found)}"
        )
        text = report_text(stuck, found, processes, heartbeat.gauges())
        path = self._write(report_name(stuck), text)
        verdict = self.stuck
        if self._on_hang is None:
            _bounded(lambda: logger.warning("stuck: %s. Report: %s", verdict, path or "cannot be written"))
        else:  # it tells the verdict
            _bounded(lambda: logger.warning("stuck in %r: ending the run", stuck.phase))
            on_hang, self._on_hang = self._on_hang, None
            on_hang(verdict if path is None else f"{verdict} (report: {path})", found)

    def _seen(self) -> list[Seen]:
        """All processes with their stacks; this one first."""
        self.reporters.forget_ended()
        own = heartbeat.process_state(self.role)
        recent = [list(span) for span in spans.recent_spans()]
        dump = Dump(heartbeat.stacks(), recent, native=py_spy(own.pid), awaited=heartbeat.awaited_stacks())
        dumps = self.reporters.dumps(SILENT_S)
        now = time.monotonic()
        still = [reporter for reporter in self.reporters.all() if reporter in dumps]  # neither ended nor new meanwhile
        return [Seen(own, 0.0, dump)] + [Seen(r.state, now - r.heard, dumps[r]) for r in still]

    def _write(self, name: str, text: str) -> Path | None:
        """The report's path; in the system's temporary folder if the run's folder does not take it in time."""
        content = text.encode(errors="replace")
        for place in (self._place, _private_place):
            written: list[Path] = []

            def write(place: Callable[[str], Path] = place, written: list[Path] = written) -> None:
                path = place(name)
                path.write_bytes(content)
                written.append(path)

            _bounded(write)
            if written:
                return written[0]
        return None

    def _place(self, name: str) -> Path:
        (self.folder / HANGS).mkdir(exist_ok=True)
        return self.folder / HANGS / name


def _private_place(name: str) -> Path:
    """A file of the system's temporary folder that only this user can read."""
    number, path = tempfile.mkstemp(prefix="lockstep_hang_", suffix=f"_{name}")
    os.close(number)
    return Path(path)


def _sign(state: ProcessState) -> Hashable:
    """What changes when a process makes progress."""
    phases = tuple((p.name, p.began, p.done) for own in state.phases for p in own)
    calls = tuple(call for call in state.calls if call.rpartition(".")[2] not in POLLS)
    return state.pid, phases, state.waits_sign, calls, state.num_moves


def _bounded(function: Callable[[], object]) -> None:
    """Call it in a thread, and wait for at most WRITE_TIMEOUT_S."""

    def call() -> None:
        try:
            function()
        except OSError as error:
            logger.debug("the watchdog cannot write: %s", error)

    thread = threading.Thread(target=call, name="watchdog-write", daemon=True)
    thread.start()
    thread.join(WRITE_TIMEOUT_S)
