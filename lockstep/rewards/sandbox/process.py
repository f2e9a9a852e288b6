"""Starts processes in a sandbox, with the strongest isolation that this machine supports.

bubblewrap   namespaces set up by `bwrap`
namespaces   the same, set up by the guard
landlock     Landlock rules of the `sandlock` package; no own PID, network and mount namespace
none         limits, a scrubbed environment and a system-call filter only; must be accepted by the user
"""

import ast
import contextlib
import functools
import logging
import marshal
import os
import select
import selectors
import shutil
import signal
import subprocess
import time
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

from lockstep.rewards.errors import RewardError
from lockstep.rewards.sandbox import view
from lockstep.rewards.sandbox.syscalls import machine, seccomp_filter

logger = logging.getLogger(__name__)

Form = Literal["bubblewrap", "namespaces", "landlock", "none"]
VARIABLE = "LOCKSTEP_SANDBOX"
"""Environment variable with the form to use; `auto`, the default, is the strongest one that works, and never `none`."""
GUARD = compile(Path(__file__).with_name("guard.py").read_text(), "<guard>", "exec", dont_inherit=True)
BOOTSTRAP = "import marshal\nwith open({file}, 'rb') as file: code, spec = marshal.load(file)\nexec(code, spec)"
STOP_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 30.0
END_TIMEOUT_S = 1.0
"""Time between the end of the output and the end of the process."""
IGNORE_STOP_SIGNALS = ["/bin/sh", "-c", "trap '' TERM INT HUP; exec \"$@\"", "sh"]
"""A stop signal to the whole job must not end the sandbox before its caller, which decides what to do with its rows."""


class SandboxError(RewardError):
    """The sandbox cannot be set up or failed by itself: no row may be scored 0 for it."""


@dataclass(frozen=True)
class Limits:
    """Limits on all processes of one sandbox together, unless stated otherwise."""

    cpu_s: float | None = 10.0
    """CPU time; None for no limit."""
    wall_s: float | None = 30.0
    """Time from start to end; None for a long-lived process."""
    memory_mb: int = 1024
    """Resident memory including files in the private folder; also the address space of each process."""
    file_mb: int = 64
    """Size of the private folder, and of each file."""
    processes: int = 64
    """Processes and threads."""
    open_files: int = 256
    """Open files per process."""


class SandboxedProcess:
    """A process in a sandbox. `stdin` and `stdout` are binary pipes; all its processes end with it, and with the caller."""

    def __init__(self, arguments: list[str], lifeline: tuple[int, int], code: int) -> None:
        guard_end, own_end = lifeline
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=ENVIRONMENT,
                pass_fds=[guard_end, code],
                start_new_session=True,
            )
        except BaseException:
            os.close(own_end)
            raise
        finally:
            os.close(guard_end)
        assert process.stdin is not None and process.stdout is not None
        self.stdin, self.stdout, self.pid = process.stdin, process.stdout, process.pid
        self._process = process
        self._stop = weakref.finalize(self, _stop, process, own_end)
        self._report: dict[str, Any] | None = None

    @property
    def error(self) -> str | None:
        """Why the process failed: the limit it exceeded or the last line it wrote to stderr. None while it runs."""
        if self._process.poll() is None:
            return None
        report = self._read_report()
        if report["exceeded"]:
            return f"exceeded the {report['exceeded']}"
        if report["exit_code"] == 0:
            return None
        return report["stderr"].strip().rpartition("\n")[2] or f"ended with exit code {report['exit_code']}"

    def kill(self) -> None:
        """Kill all processes of the sandbox and close the pipes."""
        self._stop()
        self._read_report()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def wait(self, timeout: float | None = None) -> int:
        """Exit code of the process, -N if signal N ended it; -9 if it exceeded a limit."""
        self._process.wait(timeout)
        self._stop()
        return self._read_report()["exit_code"]

    def communicate(self, data: bytes, timeout: float, max_bytes: int) -> bytes:
        """Send `data` and return the output, cut to `max_bytes`; then kill what is left.

        TimeoutError after `timeout` s; SandboxError if the sandbox, not the process in it, failed.
        """
        try:
            output, _ = self._transfer(data, timeout, lambda output: len(output) >= max_bytes, is_last=True)
        except TimeoutError:
            raise TimeoutError(f"the sandboxed process took longer than {timeout:g} s") from None
        finally:
            self.kill()
        if self._read_report()["failed"]:
            raise SandboxError(self.error)
        return output[:max_bytes]

    def ask(self, data: bytes, timeout: float, is_complete: Callable[[bytearray], bool]) -> bytes:
        """Send `data` and return the output when it is complete; EOFError if the process ends before that, TimeoutError."""
        output, has_ended = self._transfer(data, timeout, is_complete, is_last=False)
        if has_ended:
            raise EOFError("it ended")
        return output

    def _transfer(
        self, data: bytes, timeout: float, is_complete: Callable[[bytearray], bool], is_last: bool
    ) -> tuple[bytes, bool]:
        """The output, and whether the process has closed its pipes. is_last: close stdin after the data."""
        deadline = time.monotonic() + timeout
        output = bytearray()
        unsent = memoryview(data)
        has_ended = False
        os.set_blocking(self.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            selector.register(self.stdin, selectors.EVENT_WRITE)
            while not has_ended and not is_complete(output):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is self.stdout:
                        chunk = os.read(self.stdout.fileno(), 1 << 16)
                        has_ended |= not chunk
                        output += chunk
                        continue
                    try:
                        unsent = unsent[os.write(self.stdin.fileno(), unsent[: 1 << 16]) :]
                    except BrokenPipeError:
                        has_ended |= not is_last
                        unsent = unsent[:0]
                    if not unsent:
                        selector.unregister(self.stdin)
                        if is_last:
                            self.stdin.close()
        if has_ended:
            _ends(self._process, END_TIMEOUT_S)  # so that it has its own exit code and error
        return bytes(output), has_ended

    def _read_report(self) -> dict[str, Any]:
        if self._report is None:
            assert self._process.stderr is not None
            text = self._process.stderr.read().decode(errors="replace").strip()
            self._process.stderr.close()
            try:
                report = {**ast.literal_eval(text), "failed": False}
            except (ValueError, SyntaxError, TypeError):
                cause = f"the sandbox failed: {text.rpartition(chr(10))[2]}"
                report = {"failed": True, "exceeded": None, "exit_code": 1, "stderr": cause}
            if report["exceeded"]:
                report["exit_code"] = -signal.SIGKILL
            self._report = report
        return self._report


def _stop(process: subprocess.Popen[bytes], lifeline: int) -> None:
    """End the guard, which kills the rest; kill it if it does not react."""
    os.close(lifeline)
    if not _ends(process, STOP_TIMEOUT_S):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ends(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether the process ends within `timeout_s`; without the polling of `Popen.wait`."""
    if process.poll() is not None:
        return True
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


class Sandbox:
    """Starts processes that see only an interpreter, its packages, `readable` and an empty private folder."""

    def __init__(
        self,
        limits: Limits | None = None,
        readable: Iterable[str | os.PathLike[str]] = (),
        form: Form | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.form: Form = form or chosen_form()
        mounts = view.read_only(tuple(os.fspath(path) for path in readable))
        self._spec = {
            "form": self.form,
            "machine": machine(),
            "mounts": mounts,
            "masked": view.masked(mounts),
            "readable": view.without_package(mounts) if self.form == "landlock" else [],
            "devices": list(view.DEVICES),
            "folder": view.FOLDER,
            "paths": view.import_paths(),
            "environment": ENVIRONMENT,
            "seccomp": seccomp_filter(metadata=self.form in ("landlock", "none")),
            "cpu_s": self.limits.cpu_s,
            "wall_s": self.limits.wall_s,
            "memory_bytes": self.limits.memory_mb << 20,
            "file_bytes": self.limits.file_mb << 20,
            "processes": self.limits.processes,
            "open_files": self.limits.open_files,
        }

    def start(self, argv: list[str]) -> SandboxedProcess:
        """Start a program; `argv[0]` is an absolute path."""
        return self._start({"argv": argv, "code": None})

    def start_source(self, source: str) -> SandboxedProcess:
        """Run Python source in the guard's interpreter after a fork, which saves the start of a second one.

        It can import what is in site-packages; the module `site` and .pth files are not loaded.
        """
        return self._start({"argv": None, "code": _compiled(source)})

    def _start(self, target: dict[str, Any]) -> SandboxedProcess:
        try:
            return self._started(target)
        except OSError as error:
            raise SandboxError(
                f"no sandbox could be started: {error}; the machine may be out of processes, memory or open files"
            ) from error

    def _started(self, target: dict[str, Any]) -> SandboxedProcess:
        lifeline = os.pipe()
        spec = {**self._spec, **target, "lifeline": lifeline[0]}
        with open(os.memfd_create("guard"), "wb") as file:
            marshal.dump((GUARD, {"__name__": "__main__", "SPEC": spec}), file)
            file.seek(0)
            command = [view.interpreter(), "-I", "-S", "-c", BOOTSTRAP.format(file=file.fileno())]
            if self.form == "bubblewrap":
                command = [*bubblewrap(spec), "--", *command]
            return SandboxedProcess([*IGNORE_STOP_SIGNALS, *command], lifeline, file.fileno())


ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": view.FOLDER,
    "TMPDIR": view.FOLDER,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<sandboxed>", "exec", dont_inherit=True)


def bubblewrap(spec: dict[str, Any]) -> list[str]:
    """The `bwrap` command up to its target; the same view as `guard.build_root`."""
    nobody = "65534"
    command = [shutil.which("bwrap") or "bwrap", "--as-pid-1", "--hostname", "sandbox"]
    command += [f"--unshare-{name}" for name in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    command += ["--uid", nobody, "--gid", nobody]
    command += ["--perms", "1777", "--size", str(spec["file_bytes"]), "--tmpfs", spec["folder"]]
    for source, destination in spec["mounts"]:
        command += ["--ro-bind", source, destination]
    for path in spec["masked"]:
        command += ["--tmpfs", path, "--remount-ro", path]
    for device in spec["devices"]:
        command += ["--dev-bind", device, device]
    command += ["--symlink", spec["folder"], "/dev/shm", "--proc", "/proc", "--remount-ro", "/proc"]
    return [*command, "--remount-ro", "/"]


@functools.cache
def isolation() -> Form:
    """The strongest form that works on this machine, found by starting a process in it."""
    return next((form for form in get_args(Form)[:-1] if failure(form) is None), "none")


@functools.cache
def failure(form: Form) -> str | None:
    """Why a form does not work here; None if it does."""
    if form == "bubblewrap" and not shutil.which("bwrap"):
        return "bwrap is not installed"
    if form == "landlock" and not find_spec("sandlock"):
        return "sandlock is not installed (pip install lockstep-rl[sandbox])"
    try:
        process = Sandbox(Limits(), form=form).start_source("print('ready')")
        output = process.communicate(b"", PROBE_TIMEOUT_S, max_bytes=100)
    except (OSError, SandboxError) as error:  # TimeoutError is an OSError
        return str(error)
    return None if output == b"ready\n" else process.error or "no output"


def configure(wanted: str) -> None:
    """Use `reward_model.sandbox` in this process and in those that it starts."""
    os.environ[VARIABLE] = wanted


def announce() -> None:
    """Log the isolation that this run gets; if there is none, the first use of the sandbox raises an error."""
    if os.environ.get(VARIABLE, "auto") != "auto" or isolation() != "none":
        configure(chosen_form())  # reward workers need not search again


def chosen_form() -> Form:
    """The form that `LOCKSTEP_SANDBOX` asks for, by default the strongest; an error if it does not work."""
    return _checked_form(os.environ.get(VARIABLE, "auto"))


@functools.cache
def _checked_form(wanted: str) -> Form:
    if wanted not in ("auto", *get_args(Form)):
        raise SandboxError(f"{VARIABLE}={wanted}: expected auto, {', '.join(get_args(Form))}")
    form = isolation() if wanted == "auto" else cast(Form, wanted)
    if wanted == "auto" and form == "none":
        reasons = "; ".join(f"{form}: {failure(form)}" for form in get_args(Form)[:-1])
        raise SandboxError(
            f"no sandbox for untrusted code works here ({reasons}). Install bubblewrap, or accept that the code can read "
            f"and write your files with reward_model.sandbox=none (in a library, {VARIABLE}=none)"
        )
    problem = failure(form) if form != "none" else None
    if problem:
        raise SandboxError(f"reward_model.sandbox={form} does not work here: {problem}")
    if form == "none":
        logger.warning("Untrusted code runs without a sandbox (reward_model.sandbox=none)")
    else:
        logger.info("Sandbox for untrusted code: %s", form)
    return form
