"""Memory of this machine, limits of its cgroup, and memory of processes, from /proc and /sys (Linux). Imports no torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 60
"""cgroup v1 writes a number above it for "no limit"."""


@dataclass(frozen=True)
class Budget:
    """Memory that may run out: of the machine, or of a cgroup. total, available: in bytes."""

    name: str
    total: int
    available: int


@dataclass(frozen=True)
class Process:
    """command: its arguments. own_bytes: resident memory without mapped files, which the kernel can drop."""

    pid: int
    parent: int
    command: tuple[str, ...]
    comm: str
    own_bytes: int


def budgets(root: Path = Path("/")) -> list[Budget]:
    """The machine's memory, and that of each cgroup with a limit above this process; empty where there is no /proc."""
    found = [budget for budget in (_machine(root), *_cgroups(root)) if budget is not None]
    return [budget for budget in found if budget.total > 0]


def run_processes(pid: int, root: Path = Path("/")) -> list[Process]:
    """A process, all its descendants, and the Ray processes of the same user."""
    processes = {process.pid: process for process in _processes(root)}
    chosen = {pid}
    grows = True
    while grows:
        more = {p.pid for p in processes.values() if p.parent in chosen} - chosen
        chosen |= more
        grows = bool(more)
    return [p for p in processes.values() if p.pid in chosen or (p.command[:1] and p.command[0].startswith("ray::"))]


def shared_memory_bytes(folder: str = "/dev/shm") -> int:
    """What is stored there, such as Ray's object store: it is memory, and stays if the process that wrote it ends."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return 0
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def _machine(root: Path) -> Budget | None:
    values = _table(root / "proc/meminfo")
    if "MemAvailable:" not in values:
        return None
    return Budget("this machine", values["MemTotal:"] << 10, values["MemAvailable:"] << 10)


def _cgroups(root: Path) -> Iterator[Budget | None]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from (_cgroup_v2(folder) for folder in _and_parents(root / "sys/fs/cgroup", path))
        elif "memory" in controllers.split(","):
            yield from (_cgroup_v1(folder) for folder in _and_parents(root / "sys/fs/cgroup/memory", path))


def _and_parents(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it. In a container the mount may be the cgroup itself."""
    folder = mount / path.lstrip("/")
    return [f for f in (folder, *folder.parents) if f.is_relative_to(mount) and f.is_dir()]


def _cgroup_v2(folder: Path) -> Budget | None:
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    return _limited(folder, limit, used, "inactive_file", "active_file")


def _cgroup_v1(folder: Path) -> Budget | None:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    return _limited(folder, limit, used, "total_inactive_file", "total_active_file")


def _limited(folder: Path, limit: int | None, used: int | None, *cached: str) -> Budget | None:
    """cached: page cache of files, which counts as used but can be dropped."""
    if limit is None or used is None or limit >= NO_LIMIT:
        return None
    stat = _table(folder / "memory.stat")
    return Budget(f"the cgroup {folder}", limit, max(0, limit - used) + sum(stat.get(name, 0) for name in cached))


def _processes(root: Path) -> Iterator[Process]:
    try:
        user = (root / "proc/self").stat().st_uid
        entries = [entry for entry in (root / "proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return
    for entry in entries:
        try:
            if entry.stat().st_uid != user:
                continue
            command = tuple((entry / "cmdline").read_text(errors="replace").split("\0")[:-1])
            comm = (entry / "comm").read_text(errors="replace").strip()
            values = _table(entry / "status")
        except OSError:
            continue  # it has ended
        own = values.get("RssAnon:", 0) + values.get("RssShmem:", 0) or values.get("VmRSS:", 0)
        yield Process(int(entry.name), values.get("PPid:", 0), command, comm, own << 10)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _table(file: Path) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    try:
        lines = [line.split() for line in file.read_text(errors="replace").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}
