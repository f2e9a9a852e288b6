"""The files that a sandboxed process sees: what a Python interpreter needs, read-only, and nothing of the user's."""

import functools
import os
import sys
from pathlib import Path

SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FOLDER = "/tmp"
"""The private folder: the working folder, HOME and TMPDIR; a tmpfs, empty except for mounts below it."""
PACKAGE = str(Path(__file__).resolve().parents[2])


def import_paths() -> list[str]:
    """The standard library and site-packages, without paths that would import the user's own code."""
    prefixes = (sys.base_prefix, sys.prefix)
    return [
        path
        for path in sys.path
        if os.path.basename(path) in ("site-packages", "dist-packages")
        or any(path.startswith(os.path.join(prefix, "lib")) for prefix in prefixes)
    ]


def interpreter() -> str:
    """The interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


@functools.cache
def read_only(extra: tuple[str, ...]) -> list[tuple[str, str]]:
    """(source, destination) of the bind mounts, parents first. A path with symlinks is also mounted where it leads."""
    wanted = [*SYSTEM, *SYSTEM_FILES, *import_paths()]
    for prefix in (sys.base_prefix, sys.prefix):
        wanted += [os.path.join(prefix, name) for name in ("bin", "lib", "pyvenv.cfg")]
    wanted += [os.path.dirname(interpreter()), *(os.path.abspath(path) for path in extra)]
    existing = {path for path in wanted if os.path.exists(path)}
    mounts: dict[str, str] = {}
    for path in sorted(
        existing | {os.path.realpath(path) for path in existing}, key=lambda path: (path.count("/"), path)
    ):
        source = os.path.realpath(path)
        covered = any(
            path.startswith(parent + "/") and source == origin + path.removeprefix(parent)
            for parent, origin in mounts.items()
        )
        if not covered:
            mounts[path] = source
    return [(source, path) for path, source in mounts.items()]


def masked(mounts: list[tuple[str, str]]) -> list[str]:
    """Folders of the Lockstep package that a mount would show, for example in site-packages."""
    return [destination + PACKAGE.removeprefix(source) for source, destination in mounts if _is_inside(PACKAGE, source)]


def without_package(mounts: list[tuple[str, str]]) -> list[str]:
    """Sources of the mounts; a folder that holds the Lockstep package is replaced by its other entries."""
    paths = [source for source, _ in mounts]
    while holder := next((path for path in paths if _is_inside(PACKAGE, path)), None):
        paths.remove(holder)
        if holder != PACKAGE:
            paths += [os.path.join(holder, name) for name in os.listdir(holder)]
    return paths


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
