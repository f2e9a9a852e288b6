"""Copies of a run's checkpoints to its remote store, made by one thread while training goes on.

    save ─► submit ─► waiting (at most one: the newest) ─► upload, again after a pause if it fails ─► prune

A step never waits for the store. A checkpoint that is being copied stays on disk until its copy is complete; one that waits is
given up if a newer one is saved. If the store is of another experiment or has a newer save, the copy is refused with a
warning.
"""

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from lockstep.observability.jsonl import METRICS_FILE
from lockstep.observability.run_folder import CONFIG, HISTORY, JOURNAL, JOURNAL_EVENTS
from lockstep.observability.timeline import TIMELINE_FILE
from lockstep.trainer.run.remote_store import Cancelled, RemoteStore, StoreError
from lockstep.utils.progress import phase

logger = logging.getLogger(__name__)

RUN_FILES = (CONFIG, f"{HISTORY}/*.yaml", METRICS_FILE, TIMELINE_FILE, f"{JOURNAL}/{JOURNAL_EVENTS}")
"""Files of a run that go with each checkpoint. They are replaced as a whole or appended to."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pauses after failed attempts, each twice the one before."""


@dataclass(eq=False)
class _Copy:
    """number: of the save in this process. run_files: path -> its size at the save. refused: the store must not take it."""

    number: int
    folder: Path
    run_files: dict[Path, int]
    uploaded: set[str] = field(default_factory=set)
    refused: bool = False


class RemoteCopies:
    """See the module docstring. As a context manager it waits, at the end, for the copy of the last checkpoint.

    run_dir: the run's folder.
    keep:    number of newest checkpoints to keep at the store; None keeps all.
    wait_s:  how long the end of the run waits.
    """

    def __init__(self, store: RemoteStore, run_dir: Path, keep: int | None, wait_s: float) -> None:
        self._store, self._run_dir, self._keep, self._wait_s = store, run_dir, keep, wait_s
        self._changed = threading.Condition()
        self._last: _Copy | None = None
        self._waiting: _Copy | None = None
        self._current: _Copy | None = None
        self._num_copied = 0
        """Number of the newest save at the store."""
        self._num_failures = 0
        self._failure = ""
        """The last one; empty after a success."""
        self._hurry = False
        """Skip the pause before the next attempt."""
        self._cancelled = False

    def submit(self, folder: Path) -> None:
        """Copy a complete checkpoint as soon as the thread is free, with the run's files as they are now."""
        files = [path for pattern in RUN_FILES for path in sorted(self._run_dir.glob(pattern))]
        with self._changed:
            number = 1 + (self._last.number if self._last else 0)
            self._last = self._waiting = _Copy(number, folder, {path: path.stat().st_size for path in files})
            self._changed.notify_all()

    @property
    def folder_in_use(self) -> Path | None:
        """The local checkpoint that is being copied."""
        current = self._current
        return current.folder if current else None

    def metrics(self) -> dict[str, int]:
        with self._changed:
            num_saved = self._last.number if self._last else 0
            behind = num_saved - self._num_copied
            return {"checkpoint/remote_failures": self._num_failures, "checkpoint/remote_behind": behind}

    def __enter__(self) -> "RemoteCopies":
        threading.Thread(target=self._run, name="remote-checkpoints", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the last copy and log whether it is complete.

        If the run was interrupted, it does not wait; if it failed, only as long as the store works.
        """
        try:
            if kind is None or issubclass(kind, Exception):
                with phase("copy the last checkpoint"):
                    self._wait(has_failed=kind is not None)
        finally:
            with self._changed:
                self._cancelled = True
                self._changed.notify_all()
            self._report()

    def _wait(self, has_failed: bool) -> None:
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            if self._last and not self._is_idle():
                logger.info(
                    "waiting up to %g s (trainer.hdfs_wait_s) for the copy of %s to %s",
                    *(self._wait_s, self._last.folder.name, self._store.name),
                )
            self._changed.wait_for(lambda: self._is_idle() or (has_failed and self._failure), self._wait_s)

    def _is_idle(self) -> bool:
        return self._waiting is None and self._current is None

    def _report(self) -> None:
        if self._last is None:
            return
        if self._last.number == self._num_copied:
            logger.info("the last checkpoint, %s, is at %s", self._last.folder.name, self._store.name)
            return
        logger.warning(
            "the last checkpoint, %s, is not at %s: %s. It is in %s%s",
            self._last.folder.name,
            self._store.name,
            self._failure or "its copy is not complete",
            self._last.folder,
            "" if self._last.refused else "; the same command copies it when it is run again",
        )

    def _run(self) -> None:
        """The thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._cancelled)
                if self._waiting is None or self._cancelled:
                    return
                self._current, self._waiting = self._waiting, None
            self._copy(self._current)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _copy(self, copy: _Copy) -> None:
        """Upload until it succeeds or is refused, a newer checkpoint waits, or the run has ended."""
        pause_s = FIRST_PAUSE_S
        while not self._upload(copy):
            with self._changed:
                self._changed.wait_for(lambda: self._hurry or self._cancelled or self._waiting, pause_s)
                if self._cancelled or self._waiting or not copy.folder.is_dir():
                    return
                pause_s = FIRST_PAUSE_S if self._hurry else min(2 * pause_s, LONGEST_PAUSE_S)
                self._hurry = False

    def _upload(self, copy: _Copy) -> bool:
        """One attempt; whether it was the last."""
        try:
            copied = self._store.upload(copy.folder, self._read(copy), copy.uploaded, lambda: self._cancelled)
        except Cancelled:
            return False
        except Exception as error:  # noqa: BLE001 - the store's faults must not reach the run
            if not copy.folder.is_dir():  # it was pruned before its copy began
                return False
            copy.refused = isinstance(error, ValueError) and not isinstance(error, StoreError)
            self._note_failure(str(error), copy.refused)
            return copy.refused
        with self._changed:
            if self._failure:
                logger.info("%s takes checkpoints again", self._store.name)
            self._failure = ""
            self._num_copied = copy.number
        logger.debug("copied %s to %s", copy.folder, self._store.name)
        try:
            self._store.prune(self._keep, copied.step)
        except Exception as error:  # noqa: BLE001
            self._note_failure(str(error))
        return True

    def _read(self, copy: _Copy) -> dict[str, bytes]:
        """The run's files as they were at the save."""
        contents = {}
        for path, size in copy.run_files.items():
            if not path.exists():  # removed by the user
                continue
            with open(path, "rb") as file:
                contents[path.relative_to(self._run_dir).as_posix()] = file.read(size)
        return contents

    def _note_failure(self, message: str, refused: bool = False) -> None:
        with self._changed:
            is_first, self._failure = not self._failure, message
            self._num_failures += 1
            self._changed.notify_all()
        if refused:
            logger.warning("%s", message)
            return
        logger.log(
            logging.WARNING if is_first else logging.DEBUG,
            "%s. Training goes on; copies are tried again, and checkpoint/remote_failures counts what fails",
            message,
        )
