"""Checkpoint folders of a run, written atomically: a crash at any time leaves the earlier ones usable.

    .staging-global_step_N-<pid>/ ──► fsync ──► manifest.json ──► rename to global_step_N/ ──► tracker ──► prune

A folder named `global_step_N` is therefore complete; its manifest has the checksums. `TrainingRun` locks the folder
and finds the checkpoint to resume from.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import get_args

from lockstep.config.trainer import ResumeMode
from lockstep.utils.checkpoint_folder import (
    MANIFEST,
    STEP_FOLDER,
    FileEntry,
    Manifest,
    check_sizes,
    checkpoints_by_age,
    read_manifest,
)
from lockstep.utils.files import (
    atomic_write_json,
    atomic_write_text,
    ensure_writable,
    fsync_path,
    fsync_tree,
    make_private_folder,
    remove_temporary_files,
    sha256_all,
)

logger = logging.getLogger(__name__)

ROOT_KEY = "trainer.default_local_dir"
TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".run.lock"

_LEFTOVER = re.compile(r"\.(staging|replaced|pruned)-(global_step_\d+)-(\d+)")
_FULL_BELOW_BYTES = 1 << 20


def verify(folder: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest; ValueError for the first damaged file."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    checksums = sha256_all([folder / name for name in manifest.files])
    for name, entry in manifest.files.items():
        if checksums[folder / name] != entry.sha256:
            raise ValueError(f"{folder / name} is corrupt: its checksum differs from the manifest")
    return manifest


class CheckpointStore:
    """The `global_step_N` folders under `root`.

    keep:           number of newest saves to keep; None keeps all.
    in_use:         a folder that is being copied elsewhere, which is not removed meanwhile.
    least_sequence: of the next save: above the sequences of all saves elsewhere.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"trainer.max_actor_ckpt_to_keep={keep}: must be at least 1, or null to keep all")
        self.root = Path(root).expanduser().absolute()
        self.keep = keep
        self.in_use: Callable[[], Path | None] = lambda: None
        self.least_sequence = 1

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Call `write(folder)` on an empty folder and commit the result as the checkpoint of `step`: `stage` and `commit`.

        If anything fails, the incomplete folder is removed, earlier checkpoints are unchanged, and the error is raised; file
        system errors name the config key.
        """
        self.stage(step, write)
        return self.commit(step)

    def stage(self, step: int, write: Callable[[Path], None]) -> None:
        """Call `write` on a hidden folder. Its files may not be on disk yet."""
        with self._removing_what_fails(step) as (staging, _):
            make_private_folder(self.root)
            _remove(staging)
            staging.mkdir()
            write(staging)

    def commit(self, step: int) -> Path:
        """Make the checkpoint of what was staged for `step`, once it is on disk."""
        with self._removing_what_fails(step) as (staging, final):
            self._seal(staging, step)
            self._rename_into_place(staging, final)
            atomic_write_text(self.root / TRACKER, str(step))
        self.prune(final)
        return final

    @contextmanager
    def _removing_what_fails(self, step: int) -> Iterator[tuple[Path, Path]]:
        """The hidden folder of a step, which is removed if the block raises, and its final one."""
        final = self.root / f"global_step_{step}"
        staging = self._hidden("staging", final)
        try:
            yield staging, final
        except Exception as error:
            explained = self._explain(error, final)
            shutil.rmtree(staging, ignore_errors=True)
            if explained is None:
                raise
            raise explained from error
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def adopt(self, step: int, write: Callable[[Path], None]) -> Path:
        """Call `write(folder)`, which copies a whole checkpoint from elsewhere, and put it in the place of the local one."""
        final = self.root / f"global_step_{step}"
        staging = self._hidden("staging", final)
        try:
            make_private_folder(self.root)
            _remove(staging)
            staging.mkdir()
            write(staging)
            fsync_tree(staging)
            self._rename_into_place(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return final

    def find(self, resume_mode: ResumeMode, resume_from_path: str | None = None) -> tuple[int, Path] | None:
        """The step and verified folder to resume from; None to start at step 0."""
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            return _verified_path(resume_from_path)
        if resume_mode == "auto":
            return self._find_newest()
        raise ValueError(f"trainer.resume_mode={resume_mode}: must be one of {', '.join(get_args(ResumeMode))}")

    def newest(self) -> Path | None:
        """The newest complete checkpoint by its manifest; its files are not verified."""
        complete = [folder for sequence, _, folder in checkpoints_by_age(self.root) if sequence >= 0]
        return complete[-1] if complete else None

    def clean_stale(self) -> None:
        """Remove what a killed run left behind, and restore a checkpoint that it was replacing.

        Hold the run lock: it proves that nobody else writes here. The process ids in the names prove nothing, because ids are
        reused, most of all in containers.
        """
        if not self.root.is_dir():
            return
        folders = [path for path in self.root.iterdir() if path.is_dir() and not STEP_FOLDER.fullmatch(path.name)]
        for folder in (self.root, *folders):
            remove_temporary_files(folder)
        for path in sorted(self.root.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is not None and match[1] == "replaced" and not (self.root / match[2]).exists():
                logger.warning("%s: the run died while replacing %s; restoring the previous one", self.root, match[2])
                path.rename(self.root / match[2])
            elif match is not None:
                logger.info("removing %s, left behind by a killed run", path)
                _remove(path)

    def mend_tracker(self, step: int | None) -> None:
        """Write the step that `find` chose to the tracker, which is stale if the run died before it was updated; hold the lock."""
        tracker = self.root / TRACKER
        if step is None:
            tracker.unlink(missing_ok=True)
        elif self._tracked_step() != step:
            atomic_write_text(tracker, str(step))

    def _hidden(self, kind: str, final: Path) -> Path:
        return self.root / f".{kind}-{final.name}-{os.getpid()}"

    def _seal(self, staging: Path, step: int) -> None:
        """Sync the files, then write the manifest."""
        fsync_tree(staging)
        paths = sorted(path for path in staging.rglob("*") if path.is_file())
        checksums = sha256_all(paths)
        files = {str(path.relative_to(staging)): FileEntry(path.stat().st_size, checksums[path]) for path in paths}
        newest = max((sequence for sequence, _, _ in checkpoints_by_age(self.root)), default=0)
        sequence = max(1 + newest, self.least_sequence)
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

    def prune(self, newest: Path) -> None:
        """Remove the oldest saves beyond `keep`; folders without a readable manifest are never removed."""
        if self.keep is None:
            return
        others = [folder for sequence, _, folder in checkpoints_by_age(self.root) if sequence >= 0 and folder != newest]
        for folder in others[: max(0, len(others) - (self.keep - 1))]:
            if folder == self.in_use():
                continue
            pruned = self._hidden("pruned", folder)
            try:
                _remove(pruned)
                os.rename(folder, pruned)
                _remove(pruned)
            except OSError as error:
                logger.warning("cannot remove old checkpoint %s: %s", folder, error)

    def _find_newest(self) -> tuple[int, Path] | None:
        tracked = self._tracked_step()
        damaged = []
        newest_first = checkpoints_by_age(self.root)[::-1]
        without_manifest_first = sorted(
            newest_first, key=lambda entry: entry[0] >= 0
        )  # so that all of them are reported
        for _, step, folder in without_manifest_first:
            try:
                verify(folder)
            except (ValueError, OSError) as damage:
                logger.warning("skipping checkpoint %s: %s", folder, damage)
                damaged.append(f"{folder.name} ({damage})")
                continue
            if tracked is not None and tracked != step:
                logger.warning(
                    "%s says step %d, but the newest complete checkpoint is %s; resuming from that one. To choose another, set "
                    "trainer.resume_mode=resume_path and trainer.resume_from_path",
                    self.root / TRACKER,
                    tracked,
                    folder,
                )
            return step, folder
        if damaged:
            raise ValueError(
                f"{ROOT_KEY}={self.root}: all checkpoints are damaged: {'; '.join(damaged)}. "
                "Set trainer.resume_mode=disable to start at step 0"
            )
        if tracked is not None:
            logger.warning(
                "%s says step %d, but there is no checkpoint; starting at step 0", self.root / TRACKER, tracked
            )
        return None

    def _tracked_step(self) -> int | None:
        try:
            return int((self.root / TRACKER).read_text())
        except (OSError, ValueError):
            return None

    def _explain(self, error: Exception, final: Path) -> OSError | None:
        """`error` as an OSError that names the config key, or None if it is not a file system error.

        Compiled writers report a full disk as other exceptions, so the free space is checked too.
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
        fix = "free some space or set another folder"
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = "make it writable or set another folder"
        return OSError(code, f"cannot save {final.name} in {ROOT_KEY}={self.root}: {os.strerror(code)}; {fix}")


class RunLock:
    """At most one live run per folder, by a file lock that the OS releases when the process ends.

    key: the config key of the folder, for messages.
    """

    def __init__(self, root: Path, key: str = ROOT_KEY) -> None:
        self.root = Path(root).expanduser().absolute()
        self.key = key
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder; ValueError with the owning process if it is locked, or if there can be no lock file."""
        ensure_writable(self.root, self.key)
        try:
            descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(
                f"{self.key}={self.root}: cannot open the lock file {LOCK} ({error.strerror}); remove what is in its place, "
                f"or set {self.key} to another folder"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            more = " or trainer.experiment_name" if self.key == ROOT_KEY else ""
            raise ValueError(
                f"{self.key}={self.root} is in use by a live run ({owner}); wait for it, stop it, or set {self.key}{more} "
                "to another value"
            ) from None
        except OSError as error:
            logger.warning(
                "%s: the file system does not support locks (%s); do not start a second run in this folder",
                self.root,
                error,
            )
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
    """Release the lock in forked children: an orphan would otherwise hold it after the run was killed."""
    reference = weakref.ref(lock)

    def close() -> None:
        if (inherited := reference()) is not None:
            inherited.release()

    os.register_at_fork(after_in_child=close)


def _verified_path(resume_from_path: str | None) -> tuple[int, Path]:
    key = "trainer.resume_from_path"
    if not resume_from_path:
        raise ValueError(f"trainer.resume_mode=resume_path needs {key}, the global_step_N folder to resume from")
    folder = Path(resume_from_path).expanduser().absolute()
    match = STEP_FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{key}={resume_from_path} is not a checkpoint; the folder name must be global_step_N")
    if not folder.is_dir():
        raise ValueError(f"{key}={resume_from_path}: no such folder")
    try:
        verify(folder)
    except ValueError as damage:
        raise ValueError(f"{key}={resume_from_path} is damaged: {damage}") from damage
    return int(match[1]), folder


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
