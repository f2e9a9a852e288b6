"""Processes that tools leave running end with the run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.agents.tools import child_processes
from tests.agents.scripted import Scripted, call, converse, make_agents

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

TOOLS = '''
import subprocess, sys

def _note(process):
    with open(f"{{folder}}/pids", "a") as file:
        file.write(f"{process.pid}\\n")

def server() -> str:
    """Start a process and leave it, and one that ignores SIGTERM."""
    _note(subprocess.Popen(["sleep", "600"]))
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-S", "-c", stubborn], stdout=subprocess.PIPE)
    process.stdout.readline()
    _note(process)
    return "started"

def tree() -> str:
    """Start a shell with a child."""
    process = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    _note(process)
    with open(f"{{folder}}/pids", "a") as file:
        file.write(process.stdout.readline().decode())
    return "started"

def hang() -> str:
    """Start a process and wait for it."""
    process = subprocess.Popen(["sleep", "600"])
    _note(process)
    process.wait()
'''


def is_running(pid: int) -> bool:
    return child_processes._process(pid) is not None


@pytest.mark.parametrize("name", ["server", "tree", "hang"])
def test_processes_of_tools_end_with_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS.replace("{{folder}}", str(tmp_path)))
    agents = make_agents(function_tool_path=str(tmp_path / "tools.py"), tool_timeout_s=0.5)
    other = subprocess.Popen(["sleep", "600"])
    try:
        done = converse(agents, Scripted(call(name), "Done."))
        assert done.num_assistant_turns == 2
        pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
        assert len(pids) == {"server": 2, "tree": 2, "hang": 1}[name] and all(map(is_running, pids))
        agents.close()
        assert not any(map(is_running, pids)), "those that the tools left behind"
        assert is_running(other.pid), "this process has others"
    finally:
        other.kill()
        other.wait()


ORPHAN = """
import subprocess, sys
from lockstep.agents.tools import child_processes

subprocess.run("sleep 600 & echo $! > before", shell=True)
import time; time.sleep(0.1)
child_processes.begin_call()
time.sleep(0.1)
subprocess.run("sleep 600 & echo $! > after", shell=True)
child_processes.end_noted()
"""


def test_orphans_end_with_a_run_that_leads_its_process_group(tmp_path: Path) -> None:
    """A shell that ends leaves its background process to no parent of this run; those of before the first call stay."""
    subprocess.run([sys.executable, "-c", ORPHAN], cwd=tmp_path, check=True, start_new_session=True)
    before, after = (int((tmp_path / name).read_text()) for name in ("before", "after"))
    try:
        assert is_running(before) and not is_running(after)
    finally:
        os.kill(before, 9)


def test_processes_that_have_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "MANY", 0)
    running = subprocess.Popen(["sleep", "600"])
    ended = subprocess.Popen(["true"])
    ended.wait()
    try:
        child_processes._noted[ended.pid] = 1
        child_processes._noted[running.pid] = 1  # an id that was used again
        child_processes.note_children(0)
        assert not child_processes._noted
        began = time.monotonic()
        child_processes.end_noted()
        assert is_running(running.pid) and time.monotonic() - began < child_processes.GRACE_S
    finally:
        running.kill()
        running.wait()
