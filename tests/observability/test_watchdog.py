"""Deadlines, verdicts, slow notices and heartbeats of the watchdog, on made states."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.config.watchdog import BETWEEN, HEARTBEAT, RL_PHASES, SUPERVISED_PHASES, WatchdogConfig
from lockstep.observability.watchdog import watchdog as watchdog_module
from lockstep.observability.watchdog.deadlines import Deadlines
from lockstep.observability.watchdog.reporters import Dump, Reporter, Reporters
from lockstep.observability.watchdog.slow import SlowWaits
from lockstep.observability.watchdog.verdict import Seen, Stuck, culprits, in_collective, sentence
from lockstep.observability.watchdog.watchdog import Watchdog
from lockstep.utils import heartbeat, progress, timing
from lockstep.utils.heartbeat import PhaseState, ProcessState, Stack, WaitState
from lockstep.utils.progress import count, phase, waiting

SITE = "/env/lib/python3.11/site-packages"


def stack(*files: str, thread: str = "MainThread", ident: int = 1) -> Stack:
    """files: innermost first."""
    return Stack(thread, ident, [(file, 7, f"in_{Path(file).stem}") for file in files])


ALL_REDUCE = stack(
    f"{SITE}/torch/distributed/distributed_c10d.py", f"{SITE}/torch/distributed/c10d_logger.py", "/code/fsdp.py"
)
COMPUTES = stack(f"{SITE}/torch/nn/modules/linear.py", "/code/model.py")


def process(role: str, rank: int = 0, stacks: list[Stack] | None = None, answers: bool = True, **state: object) -> Seen:
    made = ProcessState(role, rank, 100 + rank, "host", now=1000.0, **state)  # type: ignore[arg-type]
    return Seen(made, 0.0 if answers else 70.0, Dump(stacks or [], answers=answers))


def blamed(phase: str, *workers: Seen, controller: Seen | None = None, pause_s: float = 60.0) -> list[str]:
    stuck = Stuck([PhaseState(phase, 900.0)], 1, pause_s, 30.0)
    return [str(found) for found in culprits(stuck, [controller or process("controller"), *workers])]


def test_deadlines_are_configured_learnt_or_first() -> None:
    config = WatchdogConfig(multiple=10, min_deadline_s=60, first_deadline_s=500, deadlines_s={"rewards": 5})
    with phase("generate"):  # of an earlier run in this process
        pass
    deadlines = Deadlines(config)
    assert deadlines.of(["generate"]) == 500
    deadlines.paused(["generate"], 3.0)
    assert deadlines.of(["generate"]) == 500  # never completed
    with phase("generate"):
        pass
    assert progress.completed(deadlines._began) == ["generate"]
    assert deadlines.of(["generate"]) == 60  # 10 x 3 is less than the minimum
    deadlines.paused(["validation", "generate"], 20.0)
    assert deadlines.of(["generate"]) == 200
    assert deadlines.of(["validation", "generate"]) == 200
    assert deadlines.of(["generate", "mini-batch 7 of 8:"]) == 200  # the inner one is new
    assert deadlines.of(["validation", "rewards"]) == 5
    assert deadlines.of(["rewards", "reward accuracy"]) == 5  # a configured one holds for what is inside
    deadlines.paused(["generate"], 201.0)  # it was stuck
    assert deadlines.of(["generate"]) == 200
    assert deadlines.of([BETWEEN]) == 500
    deadlines.paused([BETWEEN], 1.0)
    assert deadlines.of([BETWEEN]) == 60


def test_ranks_outside_of_the_collective_are_named_first() -> None:
    in_update: dict[str, Any] = {"calls": ["actor.update_actor"]}
    waiting_rank = process("actor", 0, [ALL_REDUCE], **in_update)
    found = blamed("update actor", waiting_rank, process("actor", 1, [COMPUTES], **in_update))
    assert found[0] == (
        "actor rank 1 (pid 101, host) is not in the collective: it is in actor.update_actor at /code/model.py:7 in in_model "
        "(in in_linear)"
    )
    assert found[1] == "actor rank 0 (pid 100, host) waits for it in actor.update_actor"
    found = blamed("update actor", waiting_rank, process("actor", 1, [], last_call="actor.update_actor"))
    assert found[0].startswith("actor rank 1") and "has finished actor.update_actor" in found[0]
    server: dict[str, Any] = {"waits": [WaitState("server", "http://x", 940.0)]}
    found = blamed("generate", waiting_rank, process("actor", 1, [COMPUTES], **in_update, **server))
    assert "is not in the collective: it waits for the server http://x for 60 s" in found[0]
    found = blamed("update actor", waiting_rank, process("actor", 1, [ALL_REDUCE], **in_update))
    assert len(found) == 2 and all("waits in a collective" in text for text in found)
    assert in_collective([COMPUTES, ALL_REDUCE])
    assert not in_collective([stack("/code/hook.py", f"{SITE}/torch/distributed/fsdp/hooks.py")])  # called by it


def test_a_process_that_does_not_answer_is_named_and_its_peers_are_not() -> None:
    peer = process("actor", 0, [ALL_REDUCE], calls=["actor.update_actor"])
    silent = process("actor", 1, answers=False, calls=["actor.update_actor"])
    assert blamed("update actor", peer, silent) == [
        "actor rank 1 (pid 101, host) does not answer for 70 s in actor.update_actor"
    ]
    stopped = Seen(silent.state, 70.0, Dump(answers=False, is_stopped=True))
    assert "the process is stopped" in blamed("update actor", peer, stopped)[0]


def test_what_is_waited_for_is_named_not_who_waits() -> None:
    tool, young = WaitState("tool", "search", 930.0), WaitState("tool", "fast", 999.0)
    agent = process("agent worker", 1, [COMPUTES], waits=[tool, young])
    idle = process("actor", 0, [COMPUTES], last_call="actor.advance_generation")
    found = blamed("generate", agent, idle)
    assert found == ["the tool search has not answered for 70 s, says agent worker rank 1 (pid 101, host)"]
    loader = WaitState("data loader", "Rows, process 0 of 1 (pid 7)", 930.0, thread=1)
    stopped = Dump(awaited={loader.name: heartbeat.STOPPED})
    found = blamed("read a batch", controller=Seen(process("controller", waits=[loader]).state, dump=stopped))
    assert found[0].startswith(f"the data loader {loader.name} has given no batch for 70 s: its process is stopped")
    queue = WaitState("queue", "finished groups", 900.0)
    reward = WaitState("reward", "compute_score", 930.0, thread=1)
    judge = WaitState("judge", "http://judge", 800.0, thread=2)
    found = blamed("rewards", controller=process("controller", waits=[judge, queue, reward]))
    assert [text.split(" has")[0] for text in found] == ["the reward compute_score"]  # of the stuck thread
    found = blamed("generate", controller=process("controller", waits=[judge, queue]))
    assert [text.split(" has")[0] for text in found] == ["the judge http://judge"]
    # the update waits for its worker, whatever a background thread waits for
    busy = process("actor", 0, [COMPUTES], calls=["actor.update_actor"])
    found = blamed("update actor", busy, controller=process("controller", waits=[judge]))
    assert found[0].startswith("actor rank 0 (pid 100, host) is in actor.update_actor at /code/model.py:7")


def test_without_anything_else_the_place_of_the_stuck_thread_is_named() -> None:
    other = stack("/code/other.py", ident=2)
    lock = stack(f"{SITE}/lib.py", "/code/deadlock.py")
    found = blamed("advantages", controller=process("controller", 0, [other, lock]))
    assert found == ["controller (pid 100, host) is at /code/deadlock.py:7 in in_deadlock (in in_lib)"]
    queue = [WaitState("queue", "rollout thread, take", 900.0, thread=1)]
    rollout = stack("/code/rollout.py", thread="rollout", ident=2)
    found = blamed("generate", controller=process("controller", 0, [lock, rollout], waits=queue))
    assert found == ["controller (pid 100, host) is at /code/rollout.py:7 in in_rollout"]  # not who waits for it
    idle = stack(f"{SITE}/selectors.py", thread="rollout", ident=2)
    found = blamed("generate", controller=process("controller", 0, [lock, idle], waits=queue))
    assert "/code/deadlock.py" in found[0]
    asked = process("controller", waits=[WaitState("worker", "agent worker 1 of 2", 900.0)])
    agents = [process("agent worker", rank, [COMPUTES]) for rank in (0, 1)]
    assert blamed("generate", *agents, controller=asked)[0].startswith(
        "agent worker rank 1 (pid 101, host) is at /code"
    )
    receives = Stack("MainThread", 3, [("/code/agent_worker.py", 1, "all_messages")])
    blocked = process("agent worker", 1, [receives, COMPUTES])
    assert "is at /code/model.py" in blamed("generate", blocked, controller=asked)[0]
    assert sentence([]) == ""


def test_slow_waits_are_named_once() -> None:
    slow = SlowWaits()

    def lines(now: float, *waits: WaitState) -> list[str]:
        return slow.look([ProcessState("agent worker", 0, 1, "host", now=now, waits=list(waits))], now)

    assert lines(0, WaitState("tool", "search", 0.0)) == []
    assert lines(20, WaitState("tool", "search", 0.0)) == []
    assert lines(21) == []  # it took 20 s
    search, judge = WaitState("tool", "search", 100.0), WaitState("judge", "http://x, row 3 of 8", 100.0)
    assert lines(131, search, judge) == ["the judge http://x, row 3 of 8 is slow: no answer for 31 s"]
    assert lines(150, search, WaitState("judge", "http://x, row 4 of 8", 100.0)) == []
    assert lines(201, search) == ["the tool search is slow: no answer for 101 s; until now it took at most 20 s"]
    assert lines(301, search, WaitState("queue", "groups", 0.0)) == []


def test_deadlines_may_name_every_phase_of_a_run() -> None:
    """Those of the code, but for what comes before the watchdog or between two runs, and other programs."""
    package = Path(progress.__file__).parents[1]
    files = [path for part in ("trainer", "engines") for path in (package / part).rglob("*.py")]
    others = ("generation", "evaluation", "main_eval", "main_generation")
    text = "".join(path.read_text() for path in files if not {*path.parts, path.stem} & {*others})
    names = {*re.findall(r'phase\("([^"]+)"\)', text), *timing.PHASES.values(), HEARTBEAT, BETWEEN}
    before = {"load torch and transformers", "connect to Ray", "read the data", "wait before the restart"}
    assert names - before == {*RL_PHASES, *SUPERVISED_PHASES}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watchdog]:
    """Not entered: the test calls `look`. Phases have 30 s, rewards 5 s."""
    config = WatchdogConfig(min_deadline_s=30, first_deadline_s=30, deadlines_s={"rewards": 5})
    made = Watchdog(config, tmp_path)
    with made.reporters:
        made._run_thread = threading.get_ident()
        yield made


def look(watchdog: Watchdog, *seconds: float, start: float = 1e6) -> str | None:
    """The verdict, after looks at these seconds."""
    for at in seconds:
        if at - (watchdog._ticked - start) > watchdog_module.MAX_TICK_S:
            watchdog._ticked = start + at - 1  # as if it had looked meanwhile
        watchdog.look(start + at)
    return watchdog.stuck


def test_a_phase_without_progress_is_reported_and_counts_are_progress(
    watched: Watchdog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched._ticked = 1e6
    with phase("rewards"):
        count(1, 4)
        assert look(watched, 0, 4) is None
        count(2, 4)
        assert look(watched, 4.5, 9) is None
        verdict = look(watched, 10)
        assert verdict is not None and verdict.startswith(
            "no progress in 'rewards 2/4' for 6 s (deadline 5 s): controller"
        )
        (report,) = (tmp_path / "hangs").iterdir()
        text = report.read_text()
        for part in ("Who is stuck", "Processes", "rewards 2/4", "Memory of this machine"):
            assert part in text
        assert str(report) in caplog.text
        look(watched, 15)
        assert len(caplog.records) == 1
        look(watched, 16)  # twice the time
        assert len(caplog.records) == 2
        count(3, 4)
        assert look(watched, 17) is None
        assert "the run goes on" in caplog.text


def test_a_stopped_controller_and_a_debugger_raise_no_alarm(watched: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    watched._ticked = 1e6
    with phase("rewards"):
        look(watched, 0)
        watched.look(1e6 + 500)  # the process did not run meanwhile
        assert look(watched, 501, 504) is None
        monkeypatch.setattr(heartbeat, "stacks", lambda: [stack("/lib/pdb.py", "/code/reward.py")])
        assert look(watched, 506) is None
        monkeypatch.undo()
        assert look(watched, 508) is None  # the next look at the stacks is after a minute
        assert look(watched, 567) is not None


def test_a_debugger_holds_the_thread_that_called_it_but_not_its_own_threads() -> None:
    os_lib = os.path.dirname(os.__file__)
    pdb, run, bootstrap = f"{os_lib}/pdb.py", f"{os_lib}/runpy.py", f"{os_lib}/threading.py"
    pydevd, user = f"{SITE}/debugpy/_vendored/pydevd/pydevd.py", "/code/reward.py"
    held = [(pdb, user, run), (bootstrap, pydevd, user, bootstrap), (f"{SITE}/prompt_toolkit/a.py", pdb, user)]
    free = [(bootstrap, pydevd, bootstrap), (user, run, pydevd, run), (user, run, pdb)]
    assert all(heartbeat.is_debugged(stack(*files).frames) for files in held)
    assert not any(heartbeat.is_debugged(stack(*files).frames) for files in free)


def test_a_poll_is_no_progress_and_a_wait_that_ends_is() -> None:
    def sign(*calls: str, **state: Any) -> object:
        return watchdog_module._sign(ProcessState("actor", 0, 1, "host", calls=list(calls), **state))

    assert sign("actor.advance_generation") == sign()
    assert sign("actor.update_actor") != sign()
    names = [f"tool {number}" for number in range(100)]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(waiting("tool", name, began=1.0))
        before = heartbeat.process_state()
        assert (len(before.waits), before.num_waits) == (heartbeat.MAX_WAITS, 100)
        assert heartbeat.ProcessState.from_json(json.loads(json.dumps(before.to_json()))) == before
        with waiting("queue", "groups"), waiting("file", "metrics.jsonl"):
            assert heartbeat.process_state().waits_sign == before.waits_sign
        with waiting("judge", "http://x"):
            assert heartbeat.process_state().waits_sign != before.waits_sign
        assert heartbeat.process_state().waits_sign == before.waits_sign


def test_the_status_of_many_processes_is_small(watched: Watchdog) -> None:
    waits = [WaitState("tool", "x" * 1000, 0.0)] * 20
    for rank in range(1000):
        state = ProcessState("agent worker", rank, rank, "host", waits=waits, calls=["y" * 1000])
        watched.reporters._reporters[str(rank), rank] = Reporter(mock.Mock(), state, float(-rank))
    status = watched.status()
    assert len(json.dumps(status)) < 300_000 and status["workers"][1]["rank"] == 999


def test_a_new_process_replaces_a_silent_one_and_late_answers_are_ignored() -> None:
    with Reporters("::1" if socket.has_ipv6 and _has_ipv6() else "127.0.0.1") as reporters:
        lost, here = (
            Reporter(mock.Mock(), ProcessState("actor", 0, 7, "host", machine), heard)
            for machine, heard in (("lost", 0.0), ("other", 100.0))
        )
        reporters._add(lost)
        assert not lost.is_here
        reporters._add(Reporter(mock.Mock(), ProcessState("critic", 0, 8, "host", "lost"), 90.0))
        reporters._add(here)
        assert [reporter.state.role for reporter in reporters.all()] == ["actor", "critic"]
        assert reporters.all()[0] is here

        def send(content: bytes) -> None:
            here.answer({"stacks": [1]})  # of an earlier request
            here.answer({"stacks_of": json.loads(content)["pid"], "stacks": []})

        here.connection.send_bytes = send  # type: ignore[method-assign,assignment]
        assert here.ask({"request": heartbeat.SIGNAL, "pid": 8}, 5.0) == {"stacks_of": 8, "stacks": []}


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_moves_of_workers_are_progress_except_in_the_controllers_own_phases(watched: Watchdog) -> None:
    watched._ticked = 1e6
    with phase("generate"):
        look(watched, 0, 29)
        progress.moved()
        assert look(watched, 30, 58) is None
        assert look(watched, 62) is not None
    with phase("rewards"):
        look(watched, 63)
        progress.moved()
        assert look(watched, 69) is not None


CHILD = """
import sys, time
from lockstep.utils import heartbeat
from lockstep.utils.heartbeat import Link
from lockstep.utils.progress import phase, waiting

heartbeat.start(Link("127.0.0.1", int(sys.argv[1]), bytes.fromhex(sys.argv[2])), "actor", 3)

def sleeps():
    with phase("update"), waiting("tool", "search"):
        time.sleep(600)

sleeps()
"""


def test_a_process_reports_sends_its_stacks_and_is_read_by_signal_if_it_is_silent() -> None:
    with Reporters("127.0.0.1") as reporters:
        link = reporters.link
        stranger = subprocess.Popen([sys.executable, "-c", CHILD, str(link.port), b"wrong".hex()])
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(link.port), link.key.hex()])
        try:
            _until(lambda: reporters.all() and reporters.all()[0].state.waits)
            (reporter,) = reporters.all()
            state = reporter.state
            assert (state.role, state.rank, state.pid) == ("actor", 3, child.pid)
            assert state.phases[0][0].name == "update" and state.waits[0].name == "search"
            assert state.rss > 1 << 20
            (dump,) = reporters.dumps(silent_s=60).values()
            assert dump.answers and any(name == "sleeps" for s in dump.stacks for _, _, name in s.frames)
            (dump,) = reporters.dumps(silent_s=-1).values()  # as if it did not answer
            assert not dump.answers and any(name == "sleeps" for s in dump.stacks for _, _, name in s.frames)
            os.kill(child.pid, signal.SIGSTOP)
            _until(lambda: heartbeat.is_stopped(child.pid))
            (dump,) = reporters.dumps(silent_s=60).values()
            assert dump.is_stopped and not dump.answers
            reporters.kill(state)
            child.wait(10)
            _until(lambda: not reporters.all())
        finally:
            for process in (stranger, child):
                process.kill()
                process.wait()


def _until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
