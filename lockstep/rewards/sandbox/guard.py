"""First process of a sandbox: builds its view of the system, starts the target and enforces the limits.

    trainer --Popen--> guard --fork--> target --...--> its processes
                         |  every few milliseconds: CPU, memory, processes and files of all of them

Runs in `python -I -S`, which reads its compiled code and `SPEC` from a file descriptor. It uses only the standard library,
and little of it (`_signal` is `signal` without its enums): imports take most of its start-up time.

In a PID namespace the guard is process 1, and the kernel kills all others with it. It ends when the target ends, when a
limit is exceeded, or when the trainer closes the lifeline, a pipe that the kernel closes if the trainer dies. It reports the
cause on stderr as a literal.

The target cannot reach the guard: it is not dumpable (no ptrace, no /proc/1/mem), and process 1 ignores signals
from its namespace.
"""

from __future__ import annotations

import _signal as signal
import ctypes
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes long to import
    from typing import Any

CLONE_FLAGS = 0x7E020000
"""New user, mount, PID, network, IPC, UTS and cgroup namespaces."""
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE, MNT_DETACH = -100, 0x8000, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
LINUX_CAPABILITY_VERSION_3 = 0x20080522
NOBODY = 65534

MANY_INTERVAL_S, ONE_INTERVAL_S = 0.01, 0.05
"""Between two checks with several processes, and with one, whose memory and CPU time the kernel limits."""
MAX_FILES = 10_000
MAX_DESCRIPTOR = 1 << 20
STDERR_BYTES = 2_000
PAGE_BYTES = resource.getpagesize()
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

libc = ctypes.CDLL(None, use_errno=True)


class SeccompProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(spec: dict[str, Any]) -> None:
    in_namespace = spec["form"] in ("bubblewrap", "namespaces")
    if spec["form"] == "namespaces":
        enter_namespaces(spec)
    if in_namespace:
        check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        folder = spec["folder"]
    else:
        import tempfile

        check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        folder = tempfile.mkdtemp(prefix="lockstep-sandbox-")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    os.chdir(folder)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    errors, write_errors = os.pipe()
    target = os.fork()
    if target == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_target(spec, folder, write_errors)
    os.close(write_errors)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    report = Watch(spec, target, folder, errors, woken, in_namespace).run()
    if not in_namespace:
        kill_descendants()
        os.chdir("/")
        os.spawnvp(os.P_WAIT, "rm", ["rm", "-rf", "--", folder])
    os.write(2, repr(report).encode())
    os._exit(0)


def check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def enter_namespaces(spec: dict[str, Any]) -> None:
    """Continue as process 1 of new namespaces; the calling process waits for it and exits with its code."""
    mapped, tell_mapped = os.pipe()
    uid, gid = os.getuid(), os.getgid()
    child = check(libc.syscall(SYS_CLONE[spec["machine"]], CLONE_FLAGS | signal.SIGCHLD, 0, 0, 0, 0), "clone")
    if child:
        for descriptor in (0, 1, spec["lifeline"]):
            os.close(descriptor)
        map_ids(child, uid, gid)
        os.write(tell_mapped, b"1")
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.close(tell_mapped)
    if not os.read(mapped, 1):
        os._exit(1)
    os.close(mapped)
    build_root(spec)


def map_ids(child: int, uid: int, gid: int) -> None:
    """Root becomes root and nobody, so that the target can be nobody; another user becomes nobody."""
    if uid == 0:
        write(f"/proc/{child}/gid_map", f"0 {gid} 1\n{NOBODY} {NOBODY} 1")
        write(f"/proc/{child}/uid_map", f"0 {uid} 1\n{NOBODY} {NOBODY} 1")
    else:
        write(f"/proc/{child}/setgroups", "deny")
        write(f"/proc/{child}/gid_map", f"{NOBODY} {gid} 1")
        write(f"/proc/{child}/uid_map", f"{NOBODY} {uid} 1")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(spec: dict[str, Any]) -> None:
    """Replace the file system by a read-only one that holds the mounts of `spec` and the private folder."""
    os.umask(0o022)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    os.chdir("/tmp")
    os.mkdir("old")
    check(libc.syscall(SYS_PIVOT_ROOT[spec["machine"]], b".", b"old"), "pivot_root")
    os.chdir("/")
    os.makedirs(spec["folder"], exist_ok=True)
    mount("tmpfs", spec["folder"], "tmpfs", MS_NOSUID | MS_NODEV, f"size={spec['file_bytes']},mode=1777")
    for source, destination in spec["mounts"]:  # some may be below the private folder
        bind("/old" + source, destination)
        set_attributes(destination, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, AT_RECURSIVE)
    for device in spec["devices"]:
        bind("/old" + device, device)
    os.symlink(spec["folder"], "/dev/shm")
    for path in spec["masked"]:
        mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=0755")
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    set_attributes("/", MOUNT_ATTR_RDONLY, 0)
    check(libc.sethostname(b"sandbox", 7), "sethostname")
    os.umask(0o077)


def bind(source: str, destination: str) -> None:
    if os.path.isdir(source):
        os.makedirs(destination, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(destination), exist_ok=True)
        if not os.path.exists(destination):
            os.close(os.open(destination, os.O_CREAT))
    mount(source, destination, None, MS_BIND | MS_REC)


def mount(source: str, destination: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, destination, kind, options)]
    result = libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3])
    check(result, f"mount {source} on {destination}")


def set_attributes(path: str, attributes: int, flags: int) -> None:
    """Set attributes of the mount at `path`; with AT_RECURSIVE also of those below it."""
    settings = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(settings))
    check(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, settings, size), "mount_setattr")


def run_target(spec: dict[str, Any], folder: str, errors: int) -> None:
    """Give up all rights and become the target; never returns."""
    try:
        os.setsid()
        os.dup2(errors, 2)
        os.closerange(3, MAX_DESCRIPTOR)
        confine(spec, folder)
        environment = {**spec["environment"], "HOME": folder, "TMPDIR": folder}
        if spec["code"] is None:
            os.execve(spec["argv"][0], spec["argv"], environment)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["-c"]
        sys.path.extend(path for path in spec["paths"] if path not in sys.path)
        exec(spec["code"], {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    except SystemExit as stop:
        os._exit(stop.code if isinstance(stop.code, int) else 1 if stop.code else 0)
    except BaseException as error:  # noqa: BLE001 (process boundary: the guard reports it)
        os.write(2, f"{type(error).__name__}: {error}"[:STDERR_BYTES].encode())
        os._exit(1)


def confine(spec: dict[str, Any], folder: str) -> None:
    if spec["form"] == "landlock":
        sys.path.extend(spec["paths"])
        import sandlock

        readable = [*spec["readable"], *spec["devices"]]
        sandlock.confine(sandlock.Sandbox(fs_readable=readable, fs_writable=[folder, "/dev/null"]))
    num_own = 1  # process 1 counts too if it is the same user
    if os.getuid() == 0 and spec["form"] == "namespaces":
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        num_own = 0
    header, no_capabilities = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, no_capabilities), "capset")
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, spec["file_bytes"])
    limit(resource.RLIMIT_NOFILE, spec["open_files"])
    limit(resource.RLIMIT_AS, spec["memory_bytes"])
    if spec["form"] == "namespaces":  # elsewhere it would count all processes of the user
        limit(resource.RLIMIT_NPROC, spec["processes"] + num_own)
    if spec["cpu_s"] is not None:
        limit(resource.RLIMIT_CPU, int(spec["cpu_s"]) + 1)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    rules = SeccompProgram(len(spec["seccomp"]) // 8, spec["seccomp"])
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(rules), 0, 0), "seccomp")


def limit(name: int, most: int) -> None:
    _, hard = resource.getrlimit(name)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(name, (most, most))


def readable(descriptors: list[int], timeout_s: float) -> list[int]:
    """Those that can be read or were closed; `select.select` refuses numbers above 1023, which the trainer may have."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]


class Watch:
    """Waits for the target and checks the limits of all processes of the sandbox."""

    def __init__(
        self, spec: dict[str, Any], target: int, folder: str, errors: int, woken: int, in_namespace: bool
    ) -> None:
        self.spec, self.target, self.folder = spec, target, folder
        self.errors, self.woken, self.in_namespace = [errors], woken, in_namespace
        self.tail = b""

    def run(self) -> dict[str, Any]:
        """The report: `exit_code` if the target ended, else `exceeded`, and the end of its stderr."""
        begun = time.monotonic()
        wall_s = self.spec["wall_s"]
        interval_s = next_check_s = MANY_INTERVAL_S
        while True:
            passed_s = time.monotonic() - begun
            if wall_s is not None and passed_s >= wall_s:
                return self.report(exceeded=f"wall time limit of {wall_s:g} s")
            if passed_s >= next_check_s:
                exceeded, num_processes = self.check_limits()
                if exceeded:
                    return self.report(exceeded=exceeded)
                interval_s = MANY_INTERVAL_S if num_processes > 1 else ONE_INTERVAL_S
                next_check_s = passed_s + interval_s
            ready = readable([self.spec["lifeline"], self.woken, *self.errors], interval_s)
            if any(errors in ready for errors in self.errors):
                self.read_errors()
            if self.woken in ready:
                os.read(self.woken, 4096)
                exit_code = self.reap()
                if exit_code is not None:
                    return self.report(exit_code=exit_code)
            if self.spec["lifeline"] in ready:
                return self.report(exceeded="time until it was stopped")

    def read_errors(self) -> None:
        text = os.read(self.errors[0], 1 << 16)
        if not text:  # no writer is left
            self.errors = []
        self.tail = (self.tail + text)[-STDERR_BYTES:]

    def reap(self) -> int | None:
        """Collect ended processes, orphans too; the target's exit code if it is among them."""
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if ended == self.target:
                return os.waitstatus_to_exitcode(status)
            if ended == 0:
                return None

    def report(self, exit_code: int | None = None, exceeded: str | None = None) -> dict[str, Any]:
        while self.errors and readable(self.errors, 0) and len(self.tail) < STDERR_BYTES:
            self.read_errors()
        return {"exit_code": exit_code, "exceeded": exceeded, "stderr": self.tail.decode(errors="replace")}

    def check_limits(self) -> tuple[str | None, int]:
        """The limit that is exceeded, if any, and the number of processes."""
        spec = self.spec
        pids = namespace_members() if self.in_namespace else descendants(os.getpid(), 2 * spec["processes"])
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        num_tasks, resident_bytes, cpu_s = 0, 0, own.ru_utime + own.ru_stime
        for pid in pids:
            fields = stat_fields(pid)
            if fields:
                num_tasks += int(fields[17])
                resident_bytes += int(fields[21]) * PAGE_BYTES
                cpu_s += sum(map(int, fields[11:15])) / TICKS_PER_S
        file_bytes, num_files = self.folder_usage()
        if num_tasks > spec["processes"]:
            return f"limit of {spec['processes']} processes", len(pids)
        if resident_bytes + file_bytes > spec["memory_bytes"]:  # shared pages were counted several times
            resident_bytes = sum(map(proportional_bytes, pids))
        if resident_bytes + file_bytes > spec["memory_bytes"]:
            return f"memory limit of {spec['memory_bytes'] >> 20} MB", len(pids)
        if spec["cpu_s"] is not None and cpu_s > spec["cpu_s"]:
            return f"CPU limit of {spec['cpu_s']:g} s", len(pids)
        if num_files > MAX_FILES or file_bytes > spec["file_bytes"]:
            return f"limit of {MAX_FILES} files or {spec['file_bytes'] >> 20} MB", len(pids)
        return None, len(pids)

    def folder_usage(self) -> tuple[int, int]:
        """Bytes and files in the private folder."""
        if self.in_namespace:
            system = os.statvfs(self.folder)
            return (system.f_blocks - system.f_bfree) * system.f_frsize, system.f_files - system.f_ffree
        num_bytes, num_files = 0, 0
        for parent, _, names in os.walk(self.folder):
            num_files += 1 + len(names)
            for name in names:
                try:
                    num_bytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
                except OSError:
                    continue
            if num_files > MAX_FILES:
                break
        return num_bytes, num_files


def namespace_members() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def descendants(pid: int, most: int) -> list[int]:
    """Children, their children and so on; at least `most` of them if there are more."""
    found = [pid]
    for parent in found:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue
        if len(found) > most:
            break
    return found[1:]


def kill_descendants() -> None:
    """Kill until none is left: one may fork while the list is read. Orphans become children of the guard."""
    while pids := descendants(os.getpid(), MAX_FILES):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue
        time.sleep(0.001)


def stat_fields(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the state on; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def proportional_bytes(pid: int) -> int:
    """Resident memory with shared pages divided by their number of users; all of it if the kernel refuses to tell."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    fields = stat_fields(pid)
    return int(fields[21]) * PAGE_BYTES if fields else 0


if __name__ == "__main__":
    main(SPEC)  # type: ignore[name-defined]  # noqa: F821 (set by the caller)
