"""Hostile programs: each is contained, scores 0 and leaves the judge healthy.

An attack prints BROKEN if it succeeds, which is the expected output of its test. Those that only look or reach outside also
run without a sandbox, where they must succeed: an attack that fails because of its own bug proves nothing.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.rewards.sandbox.process import Form
from lockstep.rewards.scorers.prime_code import compute_score, compute_scores
from tests.rewards.sandbox.conftest import ends, processes_with

BROKEN = {"inputs": [""], "outputs": ["BROKEN"]}
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7"]}
SUM_PROGRAM = "print(sum(map(int, input().split())))"
SECRET = "lockstep-test-secret"


@dataclass
class Outside:
    """What an attack may find outside the sandbox."""

    data: Path
    tcp_port: int
    udp_port: int
    abstract: str

    def names(self) -> dict[str, Any]:
        return {
            "DATA": str(self.data),
            "FOLDER": str(self.data.parent),
            "PACKAGE": str(Path(lockstep.__file__).parent),
            "PID": os.getpid(),
            "TCP": self.tcp_port,
            "UDP": self.udp_port,
            "ABSTRACT": self.abstract,
            "SECRET": SECRET,
        }


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    data = tmp_path / "train.jsonl"
    data.write_text(SECRET)
    abstract = f"\0lockstep-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(abstract)
        unix.listen()
        yield Outside(data, tcp.getsockname()[1], udp.getsockname()[1], abstract)


def attack_with(names: dict[str, Any], program: str) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + program


REACHING_OUT = {
    "read /etc/passwd": "if 'root' in open('/etc/passwd').read(): print('BROKEN')",
    "read training data": "if SECRET in open(DATA).read(): print('BROKEN')",
    "read through a symlink": "import os\nos.symlink(DATA, 'link')\nif SECRET in open('link').read(): print('BROKEN')",
    "read through a hard link": "import os\nos.link(DATA, FOLDER + '/hard')\nprint('BROKEN')",
    "read the environment": """
import os
values = list(os.environ.values())
for name in os.listdir('/proc'):
    try:
        values.append(open(f'/proc/{name}/environ').read())
    except OSError:
        pass
if SECRET in str(values): print('BROKEN')
""",
    "read the package": "if open(PACKAGE + '/__init__.py').read(): print('BROKEN')",
    "rewrite the judge": """
import os
if os.access(PACKAGE + '/rewards/sandbox/run_tests.py', os.R_OK):
    open(PACKAGE + '/rewards/sandbox/run_tests.py', 'a').close()
    print('BROKEN')
""",
    "write outside": "open(FOLDER + '/planted', 'w').write('x')\nprint('BROKEN')",
    "change a mode": "import os\nos.chmod(DATA, 0o640)\nprint('BROKEN')",
    "delete": "import os\nos.rename(DATA, DATA + '.old')\nos.rename(DATA + '.old', DATA)\nprint('BROKEN')",
    "leave through ..": "import os\nos.chdir('../' * 50 + FOLDER.lstrip('/'))\nif os.listdir('.'): print('BROKEN')",
    "TCP": "import socket\nsocket.create_connection(('127.0.0.1', TCP), 1)\nprint('BROKEN')",
    "UDP": "import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', UDP))\nprint('BROKEN')",
    "abstract Unix socket": "import socket\nsocket.socket(socket.AF_UNIX).connect(ABSTRACT)\nprint('BROKEN')",
    "signal the trainer": "import os\nos.kill(PID, 0)\nprint('BROKEN')",
    "limits of the trainer": "import resource\nresource.prlimit(PID, resource.RLIMIT_CORE)\nprint('BROKEN')",
    "priority of the trainer": "import os\nos.setpriority(0, PID, os.getpriority(0, PID))\nprint('BROKEN')",
    "memory without a process": "import os\nos.memfd_create('x')\nprint('BROKEN')",
}


def test_attacks_that_reach_out(form: Form, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_VARIABLE", SECRET)
    programs = {name: attack_with(outside.names(), program) for name, program in REACHING_OUT.items()}
    results = compute_scores([*programs.values(), SUM_PROGRAM], [BROKEN] * len(programs) + [SUM])
    assert {name: verdicts for name, (score, verdicts) in zip(programs, results) if score} == {}
    assert results[-1][0] == 1.0
    assert outside.data.read_text() == SECRET
    assert [path.name for path in outside.data.parent.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("name", REACHING_OUT)
def test_these_attacks_succeed_without_a_sandbox(name: str, outside: Outside, tmp_path: Path) -> None:
    if name == "rewrite the judge" and not os.access(
        Path(lockstep.__file__).parent / "rewards/sandbox/run_tests.py", os.W_OK
    ):
        pytest.skip("the package is installed read-only")
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", attack_with(outside.names(), REACHING_OUT[name])],
        cwd=work,
        env={"LOCKSTEP_TEST_VARIABLE": SECRET},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "BROKEN\n", done.stderr


INSIDE = {
    "home": """
import os, sys
home, prefix = HOME, sys.base_prefix
seen = set(os.listdir(home)) - {os.path.relpath(path, home).split('/')[0] for path in PREFIXES}
if seen: print('BROKEN')
""",
    "/etc/shadow": "print('BROKEN' if open('/etc/shadow').read() else '')",
    "system settings": "open('/proc/sys/kernel/core_pattern', 'a').write('')\nprint('BROKEN')",
    "the interpreter": "import os\nopen(os.__file__, 'a')\nprint('BROKEN')",
    "the root folder": "open('/planted', 'w')\nprint('BROKEN')",
    "import the package": "import sys\nsys.path.append(os.path.dirname(PACKAGE))\nimport lockstep.cli\nprint('BROKEN')",
    "memory of the judge": "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')\nprint('BROKEN')",
    "descriptors of the judge": "import os\nos.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY)\nprint('BROKEN')",
    "memory of process 1": "open('/proc/1/mem', 'rb')\nprint('BROKEN')",
    "trace the judge": """
import ctypes, os
if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('BROKEN')
""",
    "inherited descriptors": """
import os
for descriptor in range(1, 1024):
    try:
        os.write(descriptor, b'{"result": "BROKEN"}\\n')
    except OSError:
        pass
os._exit(0)
""",
    "kill the judge": "import os\nos.kill(os.getppid(), 9)\nprint('BROKEN')\n",
    "kill everything": "import os, time\nos.kill(-1, 9)\ntime.sleep(1)\nprint('BROKEN')\n",
    "new namespaces": "import ctypes\nprint('BROKEN' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')",
    "set-user-id programs": "import os, subprocess\nif subprocess.run(['su', '-c', 'true']).returncode == 0: print('BROKEN')",
}


def test_attacks_inside(form: Form) -> None:
    names = {
        "HOME": str(Path.home()),
        "PREFIXES": [sys.prefix, sys.base_prefix, *(path for path in sys.path if path)],
        "PACKAGE": str(Path(lockstep.__file__).parent),
    }
    programs = {name: attack_with(names, program) for name, program in INSIDE.items()}
    results = compute_scores([*programs.values(), SUM_PROGRAM], [BROKEN] * len(programs) + [SUM])
    assert {name: verdicts for name, (score, verdicts) in zip(programs, results) if score} == {}
    assert not any("NameError" in str(verdicts) for _, verdicts in results)
    assert results[-1][0] == 1.0


# What ends each; on a busy machine any of them may reach the time limit first.
EXHAUSTING = {
    "fork bomb": ("import os\nwhile True: os.fork()", "BlockingIOError|limit of"),
    "threads": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()", "thread|limit of"),
    "endless loop": ("while True: pass", "took longer than"),
    "100 GB": ("x = bytearray(100 * 10**9)\nx[::4096] = b'x' * len(x[::4096])", "MemoryError"),
    "16 children": (
        "import os, time\nfor _ in range(16):\n    if os.fork() == 0:\n        x = b'x' * 50_000_000\n"
        "        time.sleep(9)\ntime.sleep(9)",
        "memory limit of 256 MB",
    ),
    "flood of output": ("while True: print('x' * 100_000)", "No space left|too large"),
    "flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 100_000)", "took longer than"),
    "huge file": ("f = open('f', 'wb')\nwhile True: f.write(bytes(10**6))", "No space left|too large"),
    "many files": ("import itertools\nfor i in itertools.count(): open(str(i), 'w').close()", "limit of|No space left"),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "ended before|MemoryError|memory limit",
    ),
    "nested result": ("x = []\nfor _ in range(10**5): x = [x]\nprint(x)", "RecursionError|ended before|got"),
}  # fmt: skip


def test_attacks_that_exhaust(form: Form) -> None:
    programs = [program for program, _ in EXHAUSTING.values()]
    begun = time.monotonic()
    results = compute_scores(programs, [BROKEN] * len(programs), num_workers=4, test_timeout_s=1.5, memory_mb=256)
    assert time.monotonic() - begun < 60
    errors = {name: (score, verdicts[-1]["error"]) for name, (score, verdicts) in zip(EXHAUSTING, results)}
    expected = {name: [*causes.split("|"), "took longer than"] for name, (_, causes) in EXHAUSTING.items()}
    wrong = {name: error for name, error in errors.items() if not any(part in error[1] for part in expected[name])}
    assert wrong == {}
    assert {score for score, _ in errors.values()} == {0.0}
    assert compute_score(SUM_PROGRAM, SUM)[0] == 1.0


@pytest.mark.parametrize("parent_prints", [True, False])
def test_daemons_do_not_outlive_the_program(form: Form, parent_prints: bool) -> None:
    marker = f"lockstep-test-daemon-{os.getpid()}-{form}"
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sleep', [{marker!r}, '60'])
    os._exit(0)
time.sleep(0.2)
{"print('BROKEN')" if parent_prints else "os._exit(0)"}
"""
    score, _ = compute_score(program, BROKEN)
    assert score == float(parent_prints)  # a daemon that is gone is no failure
    assert not processes_with(marker)


def test_mixed_batch(form: Form) -> None:
    """Hostile and good programs side by side."""
    hostile = [EXHAUSTING[name][0] for name in ("fork bomb", "16 children", "endless loop")] + [
        INSIDE["kill everything"]
    ]
    programs = [program for attack in hostile for program in (attack, SUM_PROGRAM)]
    results = compute_scores(programs, [SUM] * len(programs), num_workers=4, test_timeout_s=6.0)
    assert [score for score, _ in results] == [0.0, 1.0] * len(hostile)


# Asserts: what a program could do to the code that checks it

HUMANEVAL = {
    "prompt": "def add(a, b):\n    '''Add.'''\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 7) == 12, 'SECRET-12'\n",
}
MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add(5, 7) == 12"]}
ADD = "def add(a, b): return a + b"
CHEATS = {
    "exit": "import sys\ndef add(a, b): sys.exit(0)",
    "exit at import": "import os\nos._exit(0)",
    "equal to everything": "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "number equal to everything": """
class N(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return N(9)
""",
    "patched AssertionError": """
import builtins
builtins.AssertionError = type('E', (SystemExit,), {})
def add(a, b): raise SystemExit(0)
""",
    "patched check": """
import builtins, sys
def check(candidate): pass
builtins.check = sys.modules['__main__'].check = check
def add(a, b): return 0
""",
    "patched judge": """
import sys
main = sys.modules['__main__']
for name in list(vars(main)):
    if callable(getattr(main, name)): setattr(main, name, lambda *a, **k: None)
def add(a, b): return 0
""",
    "frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for space in (frame.f_globals, frame.f_locals):
            for name in ('check', 'run_asserts', 'encode'):
                if name in space: space[name] = lambda *a, **k: {'int': '0x3'}
        frame = frame.f_back
    return 0
""",
    "memory": """
import gc
def add(a, b):
    found = '-'.join(['SECRET', '12']) in str([o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))])
    return a + b if found else 0
""",
    "forged line": """
import os
def add(a, b):
    for descriptor in range(256):
        try:
            os.write(descriptor, b'{"result": true}\\n' * 9)
        except OSError:
            pass
    os._exit(0)
""",
    "forged exception": "def add(a, b): raise type('StopIteration', (Exception,), {})('x')",
    "at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise SystemExit(0)",
    "kill the judge": "import os\ndef add(a, b):\n    os.kill(os.getppid(), 9)\n    return a + b",
    "hang": "def add(a, b):\n    while True: pass",
}  # fmt: skip


@pytest.mark.parametrize("tests", [HUMANEVAL, MBPP], ids=["humaneval", "mbpp"])
def test_cheats_at_asserts(form: Form, tests: dict[str, Any]) -> None:
    programs = [*CHEATS.values(), ADD]
    results = compute_scores(programs, [tests] * len(programs), test_timeout_s=1.5)
    assert {name: verdicts for name, (score, verdicts) in zip(CHEATS, results) if score} == {}
    assert results[-1] == (1.0, [{"passed": True, "error": None}] * len(results[-1][1]))


def test_sandbox_ends_with_its_caller(form: Form) -> None:
    """Also if the caller is killed and the process in the sandbox ignores what it can."""
    marker = f"lockstep-test-orphan-{os.getpid()}-{form}"
    caller = f"""
import sys, time
from lockstep.rewards.sandbox import Limits, Sandbox
process = Sandbox(Limits(cpu_s=None, wall_s=None), form={form!r}).start(
    [sys.executable, "-I", "-c", "import os; os.write(1, b'ready\\\\n'); os.execv('/bin/sleep', [{marker!r}, '60'])"]
)
print(process.stdout.readline().decode(), end="", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(lockstep.__file__).parents[1]), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        process.kill()
    assert ends(marker)
