"""The sandbox itself: pipes, exit codes, limits, what a process sees, and which form of isolation is used."""

import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockstep
from lockstep.rewards import sandbox
from lockstep.rewards.errors import RewardError
from lockstep.rewards.sandbox import Limits, Sandbox, SandboxError, process, view
from lockstep.rewards.sandbox.process import VARIABLE, Form

PACKAGE = Path(lockstep.__file__).parent


def output(form: Form, source: str, limits: Limits | None = None, readable: tuple[str, ...] = ()) -> bytes:
    started = Sandbox(limits, readable, form).start_source(source)
    result = started.communicate(b"", timeout=30, max_bytes=10_000)
    assert started.error is None, started.error
    return result


def test_conversation_with_a_long_lived_process(form: Form) -> None:
    script = "import sys\nfor line in sys.stdin: print(int(line) + 1, flush=True)\nsys.exit(3)"
    started = Sandbox(Limits(cpu_s=None, wall_s=None)).start([sys.executable, "-I", "-c", script])
    for number in (1, 41):
        started.stdin.write(f"{number}\n".encode())
        started.stdin.flush()
        assert started.stdout.readline() == f"{number + 1}\n".encode()
    assert started.error is None
    started.stdin.close()
    assert started.wait(timeout=10) == 3
    assert started.error == "ended with exit code 3"
    started.kill()


def test_packages_work(form: Form) -> None:
    started = Sandbox().start([sys.executable, "-I", "-c", "import numpy; print(numpy.arange(3).sum())"])
    assert started.communicate(b"", timeout=30, max_bytes=100) == b"3\n", started.error
    assert output(form, "import numpy\nprint(numpy.arange(3).sum())") == b"3\n"


def test_environment_and_folder(form: Form) -> None:
    """The environment is scrubbed; the working folder is private, empty and writable."""
    names = output(form, "import os\nprint(*os.environ)").split()
    assert set(names) <= {name.encode() for name in process.ENVIRONMENT}
    write = (
        "import os\nassert 'f' not in os.listdir()\nopen('f', 'w').write('x')\nprint(os.getcwd() == os.environ['HOME'])"
    )
    assert output(form, write) == b"True\n"
    assert output(form, write) == b"True\n"


def test_readable_paths_are_read_only_and_hide_the_package(form: Form, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # as root, the sandboxed process is another user
    (tmp_path / "data.txt").write_text("readable")
    source = f"""
import os
print(open({str(tmp_path / "data.txt")!r}).read())
try:
    print(os.listdir({str(PACKAGE)!r}))
except PermissionError:
    print([])
try:
    open({str(tmp_path / "data.txt")!r}, "a")
except OSError:
    print("read-only")
"""
    assert output(form, source, readable=(str(tmp_path), str(PACKAGE.parent))) == b"readable\n[]\nread-only\n"


def test_package_in_site_packages_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages" / "lockstep"
    (tmp_path / "site-packages" / "numpy").mkdir(parents=True)
    installed.mkdir()
    monkeypatch.setattr(view, "PACKAGE", str(installed))
    mounts = [(str(tmp_path), "/link")]
    assert view.masked(mounts) == ["/link/site-packages/lockstep"]
    assert view.without_package(mounts) == [str(tmp_path / "site-packages" / "numpy")]


def test_code_of_the_user_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(tmp_path) not in view.import_paths()
    assert str(PACKAGE.parent) not in view.import_paths()
    assert not any(str(tmp_path).startswith(source) for source, _ in view.read_only(()))


@pytest.mark.parametrize(
    ("source", "limits", "error"),
    [
        ("import time\ntime.sleep(9)", Limits(wall_s=0.5), "exceeded the wall time limit of 0.5 s"),
        ("while True: pass", Limits(cpu_s=0.5), "exceeded the CPU limit of 0.5 s"),
        (
            "import os, time\nfor _ in range(16):\n    if os.fork() == 0:\n        x = b'x' * 20_000_000\n"
            "        time.sleep(9)\ntime.sleep(9)",
            Limits(memory_mb=128),
            "exceeded the memory limit of 128 MB",
        ),
        ("import os\nos.kill(os.getpid(), 11)", Limits(), "ended with exit code -11"),
        ("raise KeyError(1)", Limits(), "KeyError: 1"),
        ("import sys\nsys.exit('bye')", Limits(), "ended with exit code 1"),
    ],
)  # fmt: skip
def test_why_a_process_ended(form: Form, source: str, limits: Limits, error: str) -> None:
    started = Sandbox(limits).start_source(source)
    assert started.wait(timeout=20) != 0
    assert started.error == error
    started.kill()


def test_children_that_share_their_memory_count_once(form: Form) -> None:
    source = """
import os, time
x = b'x' * 60_000_000
for _ in range(8):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
time.sleep(0.3)
print('done')
"""
    started = Sandbox(Limits(memory_mb=256)).start([sys.executable, "-I", "-c", source])
    assert started.communicate(b"", timeout=30, max_bytes=100) == b"done\n", started.error


def test_output_is_cut(form: Form) -> None:
    started = Sandbox().start_source("while True: print('x' * 1000)")
    assert len(started.communicate(b"", timeout=20, max_bytes=5_000)) == 5_000


def test_input_larger_than_a_pipe(form: Form) -> None:
    started = Sandbox().start_source("import sys\ndata = sys.stdin.read()\nprint(len(data))")
    assert started.communicate(b"x" * 1_000_000, timeout=20, max_bytes=100) == b"1000000\n"


def test_failure_of_the_sandbox_is_no_failure_of_the_program(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "DEVICES", ("/dev/missing",))
    if form == "landlock":
        monkeypatch.setattr(process, "BOOTSTRAP", "raise OSError('no start')")
    with pytest.raises(SandboxError, match=r"the sandbox failed: .*(missing|no start)"):
        Sandbox().start_source("print(1)").communicate(b"", timeout=20, max_bytes=100)


def test_a_start_that_fails_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    sandbox = Sandbox(form="none")
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(RewardError, match="no sandbox could be started"):
        sandbox.start_source("")


def test_more_open_files_than_select_takes(form: Form) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2000:
        pytest.skip("needs 2000 open files")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    null = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert Sandbox(Limits()).start_source("print('here')").communicate(b"", 30, 100) == b"here\n"
    finally:
        for descriptor in null:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_timeout_of_the_caller(form: Form) -> None:
    started = Sandbox().start_source("import time\ntime.sleep(20)")
    with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
        started.communicate(b"", timeout=0.3, max_bytes=100)
    assert started.error == "exceeded the time until it was stopped"


def test_stop_signals_to_the_whole_job_do_not_end_it(form: Form) -> None:
    started = Sandbox(Limits(wall_s=None)).start_source("print('ready', flush=True)\nprint(input())")
    assert started.stdout.readline() == b"ready\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.killpg(started.pid, number)
    time.sleep(0.1)
    assert started.communicate(b"alive\n", timeout=20, max_bytes=100) == b"alive\n"


def test_forgotten_process_ends(form: Form) -> None:
    started = Sandbox(Limits(cpu_s=None, wall_s=None)).start_source("print('ready', flush=True)\ninput()")
    assert started.stdout.readline() == b"ready\n"
    handle = started._process
    del started
    assert handle.wait(timeout=10) is not None


# The form of isolation


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "failure", lambda form: "not here")
    monkeypatch.setattr(process, "isolation", lambda: "none")
    process._checked_form.cache_clear()


@pytest.mark.usefixtures("nothing_works")
def test_no_isolation_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "auto")
    with pytest.raises(SandboxError, match=r"landlock: not here.*reward_model\.sandbox=none"):
        Sandbox()
    monkeypatch.setenv(VARIABLE, "namespaces")
    with pytest.raises(SandboxError, match=r"reward_model\.sandbox=namespaces does not work here: not here"):
        Sandbox()
    monkeypatch.setenv(VARIABLE, "docker")
    with pytest.raises(SandboxError, match="LOCKSTEP_SANDBOX=docker: expected auto, bubblewrap"):
        Sandbox()


@pytest.mark.usefixtures("nothing_works")
def test_weaker_form_is_accepted_by_key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Limits still hold, and it ends with all its processes."""
    monkeypatch.setenv(VARIABLE, "auto")
    sandbox.configure("none")
    assert output("none", "print(1)") == b"1\n"
    source = "import os, time\nif os.fork():\n    while True: pass\nos.setsid()\nos.fork()\ntime.sleep(60)"
    started = Sandbox(Limits(cpu_s=0.3)).start_source(source)
    assert started.wait(timeout=20) == -signal.SIGKILL
    assert started.error == "exceeded the CPU limit of 0.3 s"
    assert "without a sandbox (reward_model.sandbox=none)" in caplog.text
    started.kill()


def test_isolation_is_announced_once(
    form: Form, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process._checked_form.cache_clear()
    caplog.set_level(logging.INFO)
    sandbox.configure(form)
    sandbox.announce()
    sandbox.announce()
    assert caplog.text.count(f"Sandbox for untrusted code: {form}") == 1


def test_without_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next form that works is found by trying."""
    code = "from lockstep.rewards.sandbox.process import failure, isolation; print(isolation(), '|', failure('bubblewrap'))"
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found, reason = done.stdout.strip().split(" | ")
    assert (found in ("namespaces", "landlock", "none"), reason) == (True, "bwrap is not installed")
