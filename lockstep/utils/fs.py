"""Copies of remote files and folders on this machine, for every URL that fsspec opens (`s3://`, `gs://`, `hdfs://`, ...).

    URL ──► listing ──► <cache>/<digest of the URL>/<digest of the listing>/<name>

A copy is made under a temporary name and renamed when it is complete, by one process per machine; a remote file that changes gets
a new copy.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.utils.files import fsync_tree

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "LOCKSTEP_CACHE"
_LOCAL = ("file", "local")
_LOCK = ".file.lock"
_STAMPS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")
"""Names under which file systems list what changes with a file's content, best first."""
_PACKAGES = {
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    **dict.fromkeys(("webhdfs", "dbfs", "github", "jlab"), "requests"),
    "smb": "smbprotocol",
}
"""pip packages of protocols that fsspec implements itself."""


def is_remote(path: str | Path) -> bool:
    """Whether `path` is a URL, of any protocol but `file://`."""
    protocol, found, _ = str(path).partition("://")
    return bool(found) and protocol not in _LOCAL


def masked(text: str) -> str:
    """`text` without the passwords (`scheme://user:password@host`) and query strings (`?signature=…`) of its URLs."""
    text = re.sub(r"(://[^\s/:@]*):[^\s/]*@", r"\1:***@", text)
    return re.sub(r"(://[^\s?]*)\?\w+=[^\s'\"]+", r"\1?***", text)


def default_cache() -> Path:
    """`$LOCKSTEP_CACHE`, or `lockstep` in the user's cache folder."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"


def copy_to_local(
    src: str | Path,
    cache_dir: str | Path | None = None,
    filelock: str = _LOCK,
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """The local path of `src`: of its copy if it is remote, else `src` itself.

    Several processes may call this at once: one copies, the others wait. ValueError if `src` cannot be read.

    cache_dir:     where copies are kept; None is `default_cache()`.
    filelock:      name of the lock file next to the copies of one URL.
    verbose:       show a progress bar.
    always_recopy: copy again even if there is a copy of the same content.
    use_shm:       copy to memory (`/dev/shm`), a local `src` too.
    """
    src = str(src)
    if not use_shm and "://" not in src:
        return src
    filesystem, path = open_filesystem(src)
    if not use_shm and not is_remote(src):
        return path
    if use_shm:
        cache_dir = Path("/dev/shm") / f"lockstep-{os.getuid()}"
    return _copy(filesystem, path, src, None, cache_dir, filelock, verbose, always_recopy)


def copy_matching(url: str, patterns: Sequence[str]) -> str:
    """The local copy of a remote folder, with at least the files at its top that match one of the patterns."""
    filesystem, path = open_filesystem(url)
    return _copy(filesystem, path, url, patterns)


def _copy(
    filesystem: Any,
    path: str,
    src: str,
    patterns: Sequence[str] | None,
    cache_dir: str | Path | None = None,
    filelock: str = _LOCK,
    verbose: bool = False,
    always_recopy: bool = False,
) -> str:
    """patterns: of the files that are needed; None is all of them."""
    files = _listing(filesystem, path, src)
    copies = Path(cache_dir or default_cache()).expanduser() / hashlib.sha256(src.encode()).hexdigest()[:16]
    name = PurePosixPath(path).name or "root"
    if patterns is not None and not (copies / _version(files) / name).exists():  # else there is a copy of all files
        files = {n: files[n] for n in files if n == "." or ("/" not in n and any(fnmatch(n, p) for p in patterns))}
        if not files:
            raise ValueError(f"{masked(src)}: has no files {', '.join(patterns)}")
    folder = copies / _version(files)
    target = folder / name
    if target.exists() and not always_recopy:
        return str(target)
    try:
        _copy_once(filesystem, files, target, folder.parent / filelock, src, verbose, always_recopy)
    except ValueError:
        raise
    except Exception as error:  # every file system raises its own exceptions
        raise ValueError(f"{masked(src)} cannot be copied to {folder}: {reason(error)}") from error
    return str(target)


def check_protocol(url: str) -> None:
    """ValueError if the URL's protocol is unknown or its package is not installed. Contacts nobody."""
    import fsspec
    from fsspec.registry import known_implementations

    for protocol in re.findall(r"(?:^|::)([\w.+-]+)://", url):  # `zip://model::s3://bucket/x.zip` has two
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            package = _PACKAGES.get(protocol) or known_implementations[protocol]["class"].split(".")[0]
            raise ValueError(
                f"{protocol}:// URLs need a package that is not installed: pip install {package}"
            ) from error
        except ValueError as error:
            known = ", ".join(f"{name}://" for name in ("s3", "gs", "hdfs", "https"))
            raise ValueError(f"unknown protocol {protocol}://; fsspec opens {known} and others") from error


def open_filesystem(src: str) -> tuple[Any, str]:
    """The file system of `src` and the path in it; ValueError if it cannot be opened."""
    from fsspec.core import url_to_fs

    if "://" in src:
        check_protocol(src)
    try:
        return url_to_fs(src)
    except Exception as error:  # every file system raises its own exceptions
        raise ValueError(f"{masked(src)} cannot be opened: {reason(error)}") from error


def _listing(filesystem: Any, path: str, src: str) -> dict[str, dict[str, Any]]:
    """Remote name relative to `path` -> its entry; a single file is "." ."""
    try:
        filesystem.invalidate_cache()
        if filesystem.isfile(path):
            return {".": filesystem.info(path)}
        found = filesystem.find(path, detail=True)
    except Exception as error:  # every file system raises its own exceptions
        raise ValueError(f"{masked(src)} cannot be read: {reason(error)}") from error
    files = {name.removeprefix(path).lstrip("/"): entry for name, entry in found.items()}
    if not files:
        raise ValueError(f"{masked(src)}: no such file or folder")
    if any(".." in PurePosixPath(name).parts for name in files):
        raise ValueError(f"{masked(src)}: its listing leaves the folder")
    return files


def _version(files: dict[str, dict[str, Any]]) -> str:
    stamps = [next((str(entry[s]) for s in _STAMPS if entry.get(s)), "") for entry in files.values()]
    sizes = [entry.get("size") for entry in files.values()]
    return hashlib.sha256(json.dumps(sorted(zip(files, sizes, stamps))).encode()).hexdigest()[:16]


def _copy_once(
    filesystem: Any,
    files: dict[str, dict[str, Any]],
    target: Path,
    lock: Path,
    src: str,
    verbose: bool,
    always_recopy: bool,
) -> None:
    """Copy under the lock, unless another process has done it meanwhile."""
    from filelock import FileLock
    from fsspec.callbacks import DEFAULT_CALLBACK, TqdmCallback

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if target.exists() and not always_recopy:
            return
        for leftover in target.parent.glob(".*.tmp"):  # of a killed process: the lock is ours
            _remove(leftover)
        size = sum(entry.get("size") or 0 for entry in files.values())
        logger.info("copying %s (%d files, %.1f MB) to %s", masked(src), len(files), size / 1e6, target)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        local = {name: temporary if name == "." else temporary / name for name in files}
        try:
            for path in local.values():
                path.parent.mkdir(parents=True, exist_ok=True)
            callback = (
                TqdmCallback(tqdm_kwargs={"desc": masked(src), "unit": " files"}) if verbose else DEFAULT_CALLBACK
            )
            remote = [entry["name"] for entry in files.values()]
            filesystem.get(remote, [str(path) for path in local.values()], callback=callback)
            for name, path in local.items():
                expected = files[name].get("size")
                if expected is not None and path.stat().st_size != expected:
                    raise OSError(f"{path.name} has {path.stat().st_size} bytes, expected {expected}")
            fsync_tree(target.parent)
            _remove(target)
            temporary.rename(target)
        except BaseException:
            _remove(temporary)
            raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def reason(error: Exception) -> str:
    """The error in one line, without passwords."""
    return masked(f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}")
