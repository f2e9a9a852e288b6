"""Checkpoints at a remote store, `trainer.default_hdfs_dir`: any URL that fsspec opens. Imports no torch.

    URL/global_step_N/upload.json           written first, as incomplete, and last, with size and checksum of every file
    URL/global_step_N/...                   the files of the local checkpoint
    URL/global_step_N/run_files/...         what else a resumed run reads (metrics, configs, journal), as it was at the save
    URL/latest_checkpointed_iteration.txt   the step of the last copy, for stores whose listings are late

Only a folder with a complete upload.json is resumed from. A folder without upload.json is not ours: it is neither changed nor
removed. Messages contain no passwords.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lockstep.trainer.run.checkpoint import TRACKER, CheckpointStore, verify
from lockstep.utils.checkpoint_folder import (
    MANIFEST,
    STEP_FOLDER,
    FileEntry,
    Manifest,
    check_sizes,
    parse_manifest,
    read_manifest,
)
from lockstep.utils.files import make_private_folder, sha256, sha256_all
from lockstep.utils.fs import check_protocol, is_remote, masked, open_filesystem, reason
from lockstep.utils.progress import waiting

logger = logging.getLogger(__name__)

STORE_KEY = "trainer.default_hdfs_dir"
PATH_KEY = "trainer.resume_from_path"
UPLOAD = "upload.json"
RUN_FILES = "run_files"
RETRY_AFTER_S: Sequence[float] = (1.0, 3.0)
"""Pauses between the attempts to read the store at the start of a run."""
_INCOMPLETE = b'{"complete": false}\n'
T = TypeVar("T")


class StoreError(ValueError):
    """The store cannot be read or written."""


class DamagedCopy(ValueError):
    """A file of a complete remote checkpoint is missing, or differs from its checksum."""


class Cancelled(Exception):
    """The copy was given up."""


class RemoteStore:
    """The checkpoints under a URL. Every error of its file system is a StoreError.

    key:             the config key of the URL, for messages.
    name:            the URL as messages show it; by default without passwords.
    newest_sequence: the largest sequence seen at the store; 0 if none.
    check:           called with a checkpoint that is there; ValueError if it belongs to another experiment.
    """

    def __init__(self, url: str, key: str = STORE_KEY, name: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self.name = name or masked(self.url)
        self.newest_sequence = 0
        self.check: Callable[[Manifest], None] = lambda checkpoint: None
        self._is_checked = False
        self._opened: tuple[Any, str] | None = None

    def checkpoints(self) -> list[Manifest]:
        """The complete checkpoints, oldest save first."""
        return _by_age(self._states())

    def checked(self) -> list[Manifest]:
        """`checkpoints`, after a check of the newest."""
        found = self.checkpoints()
        for newest in found[-1:]:
            self.check(newest)
        self._is_checked = True
        return found

    def checkpoint(self, step: int) -> Manifest | None:
        """The complete checkpoint of a step."""
        with self._errors("cannot be read"):
            self._filesystem.invalidate_cache()
            return self._state(step)[1]

    def read(self, step: int, name: str) -> bytes:
        """A small file of a checkpoint; FileNotFoundError if it is missing."""
        with self._errors("cannot be read", FileNotFoundError):
            content: bytes = self._filesystem.cat_file(f"{self._folder(step)}/{name}")
            return content

    def check_writable(self) -> None:
        with self._errors("cannot be written"):
            path = f"{self._root}/.writable"
            self._make_root()
            self._filesystem.pipe_file(path, b"")
            with suppress(Exception):  # a store may keep what was written
                self._filesystem.rm_file(path)

    def upload(
        self,
        folder: Path,
        run_files: Mapping[str, bytes],
        uploaded: set[str],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Manifest:
        """Copy a complete local checkpoint; no-op if it is there already.

        Returns its manifest. ValueError if the store is of another experiment or has a save that is not older: nothing is
        changed then.

        uploaded: the files of an earlier attempt, which are not copied again; this attempt adds its own.
        """
        local = read_manifest(folder)
        files = local.files | {MANIFEST: _entry(folder / MANIFEST)}
        what = f"cannot take {folder.name}"
        if not uploaded:
            with self._errors(what):
                is_ours, there = self._state(local.step)
            if there is not None and files.items() <= there.files.items():
                return local
            self._refuse_older(local, folder)
        with self._errors(what):
            filesystem, target = self._filesystem, self._folder(local.step)
            if not uploaded:
                self._clear(target, is_ours)
            for name, entry in files.items():
                if is_cancelled():
                    raise Cancelled
                if name not in uploaded:
                    with waiting("file", f"{target}/{name}"):
                        filesystem.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
                        filesystem.put_file(str(folder / name), f"{target}/{name}")
                    filesystem.invalidate_cache()
                    if (size := filesystem.size(f"{target}/{name}")) not in (entry.size, None):
                        raise OSError(f"{name} has {size} bytes there, but {entry.size} here")
                    uploaded.add(name)
            for name, content in run_files.items():
                path = f"{RUN_FILES}/{name}"
                filesystem.makedirs(f"{target}/{path}".rpartition("/")[0], exist_ok=True)
                filesystem.pipe_file(f"{target}/{path}", content)
                files[path] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
            if is_cancelled():
                raise Cancelled
            complete = Manifest(local.step, local.sequence, local.saved_at, files)
            filesystem.pipe_file(f"{target}/{UPLOAD}", json.dumps(asdict(complete), indent=2).encode())
            self._note(complete)
            filesystem.pipe_file(f"{self._root}/{TRACKER}", str(local.step).encode())
        return local

    def prune(self, keep: int | None, step: int) -> None:
        """Remove all but the `keep` newest checkpoints, and what killed runs have left of incomplete ones.

        step: the last copy, which stays, as does all that is newer.
        """
        states = self._states()
        last = states.pop(step, None)
        incomplete = [other for other, manifest in states.items() if manifest is None]
        old = []
        if keep is not None and last is not None:
            others = _by_age(states)
            surplus = others[: max(0, len(others) - (keep - 1))]
            old = [manifest.step for manifest in surplus if manifest.sequence < last.sequence]
        with self._errors("old checkpoints cannot be removed"):
            for other in [*incomplete, *old]:
                target = self._folder(other)
                self._clear(target, is_ours=True)
                self._filesystem.rm(target, recursive=True)

    def fetch(self, manifest: Manifest, folder: Path) -> None:
        """Copy a checkpoint with its run files into an empty local folder; DamagedCopy names the first bad file."""
        source = self._folder(manifest.step)
        size = sum(entry.size for entry in manifest.files.values())
        logger.info("fetching %s (%d files, %.1f MB)", self._name(manifest), len(manifest.files), size / 1e6)
        for name in manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        local = [folder / name for name in manifest.files]
        try:
            with self._errors(f"{folder_name(manifest.step)} cannot be fetched", FileNotFoundError):
                remote = [f"{source}/{name}" for name in manifest.files]
                self._filesystem.get(remote, [str(path) for path in local])
        except FileNotFoundError as error:
            raise DamagedCopy(f"{self._name(manifest)}: a file is missing ({reason(error)})") from None
        try:
            check_sizes(folder, manifest)
        except ValueError as error:
            raise DamagedCopy(f"{self._name(manifest)}: {str(error).replace(f'{folder}/', '')}") from None
        checksums = sha256_all(local)
        for name, entry in manifest.files.items():
            if checksums[folder / name] != entry.sha256:
                raise DamagedCopy(f"{self._name(manifest)}/{name} is corrupt: its checksum differs from {UPLOAD}")

    @property
    def _filesystem(self) -> Any:
        self._opened = self._opened or open_filesystem(self.url)
        return self._opened[0]

    @property
    def _root(self) -> str:
        self._opened = self._opened or open_filesystem(self.url)
        return self._opened[1].rstrip("/")

    def _make_root(self) -> None:
        """Object stores need none. A local one can be read by its owner only, as the run's folder."""
        if not is_remote(self.url):
            make_private_folder(Path(self._root))
        else:
            self._filesystem.makedirs(self._root, exist_ok=True)

    def _folder(self, step: int) -> str:
        return f"{self._root}/{folder_name(step)}"

    def _name(self, manifest: Manifest) -> str:
        return f"{self.name}/{folder_name(manifest.step)}"

    def _states(self) -> dict[int, Manifest | None]:
        """Step -> manifest of each of our folders; None if it is incomplete."""
        with self._errors("cannot be read"):
            filesystem = self._filesystem
            filesystem.invalidate_cache()
            try:
                names = filesystem.ls(self._root, detail=False)
            except FileNotFoundError:
                names = []
            found = (STEP_FOLDER.fullmatch(PurePosixPath(name.rstrip("/")).name) for name in names)
            steps = {int(match[1]) for match in found if match is not None}
            with suppress(FileNotFoundError, ValueError):
                steps.add(int(filesystem.cat_file(f"{self._root}/{TRACKER}")))
            states = {step: self._state(step) for step in sorted(steps)}
        return {step: manifest for step, (is_ours, manifest) in states.items() if is_ours}

    def _state(self, step: int) -> tuple[bool, Manifest | None]:
        """Whether a folder is ours, and its manifest if it is complete."""
        try:
            manifest = parse_manifest(self._filesystem.cat_file(f"{self._folder(step)}/{UPLOAD}"))
        except FileNotFoundError:
            return False, None
        except ValueError:
            return True, None
        if manifest.step != step:
            return True, None
        self._note(manifest)
        return True, manifest

    def _refuse_older(self, local: Manifest, folder: Path) -> None:
        """ValueError unless the store is of this experiment and all saves there are older."""
        found = self.checkpoints() if self._is_checked else self.checked()
        for newest in found[-1:]:
            if newest.sequence >= local.sequence:
                raise ValueError(
                    f"{self.key}={self.name}: {folder.name} is not copied, because {folder_name(newest.step)} there is not older "
                    f"(save {newest.sequence}; this one is save {local.sequence}). The next save is copied; to resume from "
                    f"this one, set trainer.resume_mode=resume_path {PATH_KEY}={folder}"
                )

    def _note(self, manifest: Manifest) -> None:
        self.newest_sequence = max(self.newest_sequence, manifest.sequence)

    def _clear(self, target: str, is_ours: bool) -> None:
        """Mark the folder as incomplete and remove its other files; StoreError if it is not ours."""
        filesystem = self._filesystem
        filesystem.invalidate_cache()
        others = [path for path in filesystem.find(target) if PurePosixPath(path).name != UPLOAD]
        if others and not is_ours:
            name = PurePosixPath(target).name
            raise StoreError(
                f"{self.key}={self.name}: {name} has files but no {UPLOAD}, so it was not written by this key and is left as it "
                f"is; remove it or set {self.key} to another folder"
            )
        self._make_root()
        filesystem.makedirs(target, exist_ok=True)
        filesystem.pipe_file(f"{target}/{UPLOAD}", _INCOMPLETE)
        if others:
            filesystem.rm(others)

    @contextmanager
    def _errors(self, what: str, *passed: type[Exception]) -> Iterator[None]:
        """Errors as StoreErrors without passwords, also in the chain. passed: errors that stay as they are."""
        kept: tuple[type[Exception], ...] = (StoreError, Cancelled, *passed)
        try:
            yield
        except kept:
            raise
        except Exception as error:  # noqa: BLE001 - every file system raises its own exceptions
            text, password = reason(error), urlsplit(self.url).password
            text = text.replace(password, "***") if password else text
            raise StoreError(f"{self.key}={self.name}: {what} ({text})") from None


def folder_name(step: int) -> str:
    return f"global_step_{step}"


def retried(call: Callable[[], T]) -> T:
    """The result of `call`, which is tried again after each of `RETRY_AFTER_S` if the store fails."""
    for pause_s in RETRY_AFTER_S:
        try:
            return call()
        except StoreError:
            time.sleep(pause_s)
    return call()


def reach(store: RemoteStore, local: CheckpointStore) -> list[Manifest]:
    """The checkpoints at the store; if it fails, a warning, or StoreError for a run without local checkpoints.

    ValueError if they belong to another experiment.
    """
    try:
        return retried(store.checked)
    except StoreError as error:
        if local.newest() is None:
            raise StoreError(f"{error}; {NEEDED_AT_START}") from None
        logger.warning("%s; the run goes on with its local checkpoints", error)
        return []


NEEDED_AT_START = (
    f"a run without local checkpoints needs the store at its start: make it available, or remove {STORE_KEY}"
)


def find_or_fetch(store: RemoteStore, local: CheckpointStore) -> tuple[int, Path] | None:
    """The newest checkpoint of both, in the local folder; None to start at step 0.

    A damaged remote checkpoint is skipped with a warning; ValueError if there is no intact one anywhere, or if the store is of
    another experiment.
    """
    found, local_damage = None, None
    try:
        found = local.find("auto")
    except ValueError as error:
        local_damage = error
    damaged = []
    newest_local = read_manifest(found[1]).sequence if found else 0
    for manifest in reversed(reach(store, local)):
        if manifest.sequence <= newest_local:
            break
        try:
            store.check(manifest)
            return manifest.step, _fetch(store, manifest, local, restore=True)
        except DamagedCopy as damage:
            logger.warning("skipping a remote checkpoint: %s", damage)
            damaged.append(str(damage))
        except StoreError as error:
            if found is None:
                raise
            logger.warning("%s; resuming from %s", error, found[1])
            break
    if damaged and found is None:
        raise ValueError(
            f"{store.key}={store.name}: all checkpoints are damaged: {'; '.join(damaged)}. "
            "Set trainer.resume_mode=disable to start at step 0"
        )
    if local_damage is not None:
        raise local_damage
    return found


def check_url(key: str, url: str) -> None:
    """ValueError if the URL's protocol is unknown or its package is not installed."""
    try:
        check_protocol(url)
    except ValueError as error:
        raise ValueError(f"{key}={masked(url)}: {error}") from error


def find_path(url: str) -> tuple[RemoteStore, Manifest]:
    """The complete checkpoint at `trainer.resume_from_path`; ValueError if there is none."""
    root, _, name = url.rstrip("/").rpartition("/")
    store = RemoteStore(root, PATH_KEY)
    match = STEP_FOLDER.fullmatch(name)
    if match is None:
        raise ValueError(f"{PATH_KEY}={masked(url)} is not a checkpoint; the folder name must be global_step_N")
    step = int(match[1])
    manifest = retried(lambda: store.checkpoint(step))
    if manifest is None:
        raise ValueError(
            f"{PATH_KEY}={masked(url)} is not a complete checkpoint: it has no {UPLOAD}, or its copy was interrupted"
        )
    return store, manifest


def fetch_path(url: str, local: CheckpointStore, restore: bool) -> tuple[int, Path]:
    """Fetch the checkpoint at a URL into the local folder, unless it is there. restore: with its run files."""
    store, manifest = find_path(url)
    step, folder = manifest.step, local.root / folder_name(manifest.step)
    if folder.exists():
        with suppress(ValueError):
            if verify(folder).files.items() <= manifest.files.items():
                return step, folder
        raise ValueError(
            f"{PATH_KEY}={masked(url)}: {folder} is another checkpoint of the same step; remove it, or set "
            "trainer.default_local_dir to another folder"
        )
    try:
        return step, _fetch(store, manifest, local, restore)
    except DamagedCopy as damage:
        raise ValueError(f"{PATH_KEY}={masked(url)} is damaged: {damage}") from None


def _fetch(store: RemoteStore, manifest: Manifest, local: CheckpointStore, restore: bool) -> Path:
    """restore: put its run files into the local folder too, in place of those there."""

    def write(staging: Path) -> None:
        retried(lambda: store.fetch(manifest, staging))
        for name in (n for n in manifest.files if restore and n.startswith(f"{RUN_FILES}/")):
            target = local.root / name.removeprefix(f"{RUN_FILES}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, target)
        shutil.rmtree(staging / RUN_FILES, ignore_errors=True)

    return local.adopt(manifest.step, write)


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, sha256(path))


def _by_age(states: Mapping[int, Manifest | None]) -> list[Manifest]:
    """The complete ones, oldest save first."""
    complete = [manifest for manifest in states.values() if manifest is not None]
    return sorted(complete, key=lambda manifest: manifest.sequence)
