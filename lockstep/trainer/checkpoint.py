"""The checkpoint folders of one run: written so that a crash at any moment leaves the earlier ones usable.

    .staging-global_step_N-<pid>/ ──► fsync ──► manifest.json ──► rename to global_step_N/ ──► tracker ──► prune

A folder named `global_step_N` is therefore complete, and its manifest proves it. The order of starting a run is
`RunLock.acquire`, `CheckpointStore.clean_stale`, `CheckpointStore.find`.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from lockstep.utils.files import atomic_write_json, atomic_write_text, ensure_writable, fsync_path, fsync_tree, sha256

logger = logging.getLogger(__name__)

ROOT_KEY = "trainer.default_local_dir"
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".run.lock"

_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_LEFTOVER = re.compile(r"\.(staging|replaced|pruned)-(global_step_\d+)-(\d+)")
_FULL_BELOW_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint as it was when saved."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The last file written into a checkpoint.

    step:     the training step, equal to the folder's N.
    sequence: counts the saves into this root. The newest save is the one to go on from, also when the run went back
              to an earlier step and older folders carry larger numbers.
    saved_at: unix time, for the reader.
    files:    path relative to the folder -> size and checksum; everything but the manifest itself.
    """

    step: int
    sequence: int
    saved_at: float
    files: dict[str, FileEntry]


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; ValueError with the reason where there is none that makes sense."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
        files = {name: FileEntry(int(entry["size"]), str(entry["sha256"])) for name, entry in raw["files"].items()}
        manifest = Manifest(int(raw["step"]), int(raw["sequence"]), float(raw["saved_at"]), files)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a checkpoint manifest ({error!r})") from error
    if folder.name != f"global_step_{manifest.step}":
        raise ValueError(f"{path} belongs to step {manifest.step}, the folder is {folder.name}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest; ValueError that names the first damaged file."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if (size := path.stat().st_size) != entry.size:
            raise ValueError(f"{path} has {size} bytes, its manifest says {entry.size}")
    checksums = _checksums([folder / name for name in manifest.files])
    for name, entry in manifest.files.items():
        if checksums[folder / name] != entry.sha256:
            raise ValueError(f"{folder / name} has changed: its checksum differs from the manifest's")
    return manifest


def _checksums(paths: list[Path]) -> dict[Path, str]:
    """Checksums of many files; hashing releases the interpreter lock, so threads share the work."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(sha256, paths)))


class CheckpointStore:
    """The `global_step_N` folders under `root`.

    keep: how many of the newest saves to keep; None keeps all.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"trainer.max_actor_ckpt_to_keep={keep}: keep at least 1, or null to keep all")
        self.root = Path(root).expanduser().absolute()
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Call `write(folder)` on an empty folder and make what it wrote the checkpoint of `step`.

        When anything fails, the half-made folder is removed, earlier checkpoints stay as they were, and the error is
        raised; one of the file system names the config key.
        """
        final = self.root / f"global_step_{step}"
        staging = self._hidden("staging", final)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _remove(staging)
            staging.mkdir()
            write(staging)
            self._seal(staging, step)
            self._rename_into_place(staging, final)
            atomic_write_text(self.root / TRACKER, str(step))
        except Exception as error:
            explained = self._explain(error, final)
            shutil.rmtree(staging, ignore_errors=True)
            if explained is None:
                raise
            raise explained from error
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        self._prune(final)
        return final

    def find(
        self, resume_mode: Literal["auto", "disable", "resume_path"], resume_from_path: str | None = None
    ) -> tuple[int, Path] | None:
        """The step and folder to go on from, verified; None to begin at step 0."""
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            return _verified_path(resume_from_path)
        if resume_mode == "auto":
            return self._find_newest()
        raise ValueError(f"trainer.resume_mode={resume_mode}: known are auto, disable, resume_path")

    def clean_stale(self) -> None:
        """Remove what dead processes left half done, and put back a checkpoint that one had moved aside.

        Folders of another process that is alive on this host stay. This process's own count as left over, because in a
        container a restarted run often has the process id of the one before: call this before the first save.
        """
        if not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None:
                continue
            kind, name, pid = match[1], match[2], int(match[3])
            if pid != os.getpid() and _is_alive(pid):
                continue
            if kind == "replaced" and not (self.root / name).exists():
                logger.warning("%s: the run died while replacing %s; putting the earlier one back", self.root, name)
                path.rename(self.root / name)
            else:
                logger.info("removing %s, left by process %d", path, pid)
                _remove(path)

    def _hidden(self, kind: str, final: Path) -> Path:
        return self.root / f".{kind}-{final.name}-{os.getpid()}"

    def _seal(self, staging: Path, step: int) -> None:
        """Sync what was written, then write the manifest that vouches for it."""
        fsync_tree(staging)
        paths = sorted(path for path in staging.rglob("*") if path.is_file())
        checksums = _checksums(paths)
        files = {str(path.relative_to(staging)): FileEntry(path.stat().st_size, checksums[path]) for path in paths}
        sequence = 1 + max((sequence for sequence, _, _ in self._by_age()), default=0)
        atomic_write_json(staging / MANIFEST, asdict(Manifest(step, sequence, time.time(), files)))

    def _rename_into_place(self, staging: Path, final: Path) -> None:
        replaced = self._hidden("replaced", final)
        _remove(replaced)
        if final.exists():
            os.rename(final, replaced)
        try:
            os.rename(staging, final)
        except BaseException:
            if replaced.exists() and not final.exists():
                os.rename(replaced, final)
            raise
        fsync_path(self.root)
        _remove(replaced)

    def _by_age(self) -> list[tuple[int, int, Path]]:
        """(sequence, step, folder) of every `global_step_N`, oldest save first; without a manifest, sequence is -1."""
        found = []
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            match = _STEP_FOLDER.fullmatch(folder.name)
            if match is None or not folder.is_dir():
                continue
            try:
                sequence = read_manifest(folder).sequence
            except (ValueError, OSError):
                sequence = -1
            found.append((sequence, int(match[1]), folder))
        return sorted(found)

    def _prune(self, written: Path) -> None:
        """Remove the oldest saves beyond `keep`; folders without a readable manifest are not ours to remove."""
        if self.keep is None:
            return
        others = [folder for sequence, _, folder in self._by_age() if sequence >= 0 and folder != written]
        for folder in others[: max(0, len(others) - (self.keep - 1))]:
            pruned = self._hidden("pruned", folder)
            try:
                _remove(pruned)
                os.rename(folder, pruned)
                _remove(pruned)
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s: %s", folder, error)

    def _find_newest(self) -> tuple[int, Path] | None:
        tracked = self._tracked_step()
        damaged = []
        newest_first = self._by_age()[::-1]
        without_manifest_first = sorted(newest_first, key=lambda entry: entry[0] >= 0)  # so that all of them are named
        for _, step, folder in without_manifest_first:
            try:
                verify(folder)
            except (ValueError, OSError) as damage:
                logger.warning("skipping checkpoint %s: %s", folder, damage)
                damaged.append(f"{folder.name} ({damage})")
                continue
            if tracked is not None and tracked != step:
                logger.warning(
                    "%s names step %d, but the newest complete checkpoint is %s; going on from that one. To choose "
                    "another, set trainer.resume_mode=resume_path and trainer.resume_from_path",
                    self.root / TRACKER,
                    tracked,
                    folder,
                )
            return step, folder
        if damaged:
            raise ValueError(
                f"{ROOT_KEY}={self.root}: every checkpoint there is damaged: {'; '.join(damaged)}. "
                "Set trainer.resume_mode=disable to begin at step 0"
            )
        if tracked is not None:
            logger.warning("%s names step %d, but no checkpoint is there; beginning at 0", self.root / TRACKER, tracked)
        return None

    def _tracked_step(self) -> int | None:
        try:
            return int((self.root / TRACKER).read_text())
        except (OSError, ValueError):
            return None

    def _explain(self, error: Exception, final: Path) -> OSError | None:
        """`error` in the user's terms, or None where it is not the file system's.

        Writers in compiled code report a full disk as an error of their own kind, so the free space is asked too.
        """
        code = error.errno if isinstance(error, OSError) else None
        if code is None:
            try:
                free = shutil.disk_usage(self.root).free
            except OSError:
                return None
            if free >= _FULL_BELOW_BYTES:
                return None
            code = errno.ENOSPC
        fix = "free some space there or set it to another folder"
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = "make it writable or set it to another folder"
        return OSError(code, f"cannot save {final.name} in {ROOT_KEY}={self.root}: {os.strerror(code)}; {fix}")


class RunLock:
    """At most one live run per folder, by a lock that the system lets go when the process ends, however it ends."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the folder; ValueError that names the process which has it."""
        ensure_writable(self.root, ROOT_KEY)
        descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ValueError(
                f"{ROOT_KEY}={self.root} is in use by a live run ({owner}); wait for it, stop it, or set {ROOT_KEY} "
                "or trainer.experiment_name to something else"
            ) from None
        except OSError as error:
            logger.warning("%s: this file system has no locks (%s); start no second run here", self.root, error)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor
        _close_in_forked_children(self)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _close_in_forked_children(lock: RunLock) -> None:
    """A forked child shares the lock; without this an orphan would hold the folder after the run was killed."""
    reference = weakref.ref(lock)

    def close() -> None:
        if (held := reference()) is not None:
            held.release()

    os.register_at_fork(after_in_child=close)


def _verified_path(resume_from_path: str | None) -> tuple[int, Path]:
    key = "trainer.resume_from_path"
    if not resume_from_path:
        raise ValueError(f"trainer.resume_mode=resume_path needs {key}, the global_step_N folder to go on from")
    folder = Path(resume_from_path).expanduser().absolute()
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{key}={resume_from_path} is not a checkpoint; its last part must be global_step_N")
    if not folder.is_dir():
        raise ValueError(f"{key}={resume_from_path}: no such folder")
    try:
        verify(folder)
    except ValueError as damage:
        raise ValueError(f"{key}={resume_from_path} is damaged: {damage}") from damage
    return int(match[1]), folder


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
