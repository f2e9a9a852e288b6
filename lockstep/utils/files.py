"""Crash-safe files: written to a temporary file, synced to disk, then renamed into place; and paths close to a misspelt one."""

import difflib
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.utils.progress import waiting

_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp|\.writable-[a-z0-9_]{8}")
"""Names of temporary files."""


@contextmanager
def atomic_writer(path: Path | str, sync: bool = True) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` when the block ends; removed if the block raises.

    Readers see the old content or the new, never a part; with `sync` the new content survives a power failure after the block.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with waiting("file", str(path)):
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        fsync_path(path.parent)


def atomic_write_bytes(path: Path | str, data: bytes, sync: bool = True) -> None:
    with atomic_writer(path, sync) as file:
        file.write(data)


def atomic_write_text(path: Path | str, text: str) -> None:
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity are errors, since strict JSON readers reject them."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def remove_temporary_files(folder: Path) -> None:
    """Remove what `atomic_writer` and `ensure_writable` left in the folder when their process was killed."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            path.unlink()


def fsync_path(path: Path | str) -> None:
    """Flush one file's content, or one folder's entries, to disk."""
    with waiting("file", str(path)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fsync_tree(folder: Path | str) -> None:
    """Flush `folder` and everything under it to disk; symbolic links are not followed."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                fsync_path(path)
        fsync_path(parent)


def sha256(path: Path | str) -> str:
    """The file's SHA-256 in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_all(paths: Sequence[Path]) -> dict[Path, str]:
    """SHA-256 of many files, in threads: hashing releases the GIL."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(sha256, paths)))


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner can enter, for what may be private: configs, prompts, responses, weights.

    One that exists keeps its permissions; missing parents get the usual ones.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def ensure_writable(folder: Path | str, key: str) -> Path:
    """Create `folder`, private, and check that it is writable. key: its config key, for the error message."""
    path = Path(folder).expanduser()
    try:
        make_private_folder(path)
        with tempfile.TemporaryFile(prefix=".writable-", dir=path):  # has no name, so a stop leaves nothing behind
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{key}={folder}: cannot write there ({reason}); set {key} to a writable folder") from error
    return path


MAX_CANDIDATES = 5000
"""Entries of a folder that are compared with a misspelt name."""
MIN_LIKENESS = 0.7


def did_you_mean_path(path: Path | str) -> str:
    """` (did you mean PATH?)` with the existing path whose parts are spelled most like those of `path`; empty if none is close."""
    near = _nearest_path(Path(path))
    return f" (did you mean {near}?)" if near is not None else ""


def _nearest_path(path: Path) -> Path | None:
    parent = path.parent if path.parent.is_dir() else _nearest_path(path.parent)
    if parent is None or path.parent == path:
        return None
    try:
        entries = list(islice(parent.iterdir(), MAX_CANDIDATES))
    except OSError:
        return None
    likeness, near = max(((_likeness(entry, path), entry) for entry in entries), default=(0.0, path))
    return near if likeness >= MIN_LIKENESS else None


def _likeness(one: Path, other: Path) -> float:
    """Similarity of the names, from 0 to 1; an equal ending such as .parquet does not make them alike."""
    if one.stem == other.stem:
        return 1.0
    ratios = (difflib.SequenceMatcher(a=a, b=b).ratio() for a, b in ((one.name, other.name), (one.stem, other.stem)))
    return min(ratios)
