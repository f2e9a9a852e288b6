"""verl.utils.hdfs_io: files by path or URL (`hdfs://`, `s3://`, anything that fsspec reads)."""

import os
import shutil
from typing import Any

from fsspec.core import url_to_fs

from lockstep.verl.utils.fs import is_non_local


def exists(path: str, **kwargs: Any) -> bool:
    file_system, name = url_to_fs(os.path.expanduser(path), **kwargs)
    return bool(file_system.exists(name))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    """Create a folder and its parents. mode: permissions of a local folder."""
    if not is_non_local(name):
        os.makedirs(os.path.expanduser(name), mode, exist_ok=exist_ok)
        return
    file_system, folder = url_to_fs(name, **kwargs)
    file_system.makedirs(folder, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file or a folder; either side may be a URL. Returns True."""
    src, dst = os.path.expanduser(src), os.path.expanduser(dst)
    if is_non_local(src) and is_non_local(dst):
        raise ValueError(f"copy from {src} to {dst}: one of them must be a local path")
    if is_non_local(dst):
        file_system, target = url_to_fs(dst, **kwargs)
        file_system.put(src, target, recursive=os.path.isdir(src))
    elif is_non_local(src):
        file_system, source = url_to_fs(src, **kwargs)
        file_system.get(source, dst, recursive=file_system.isdir(source))
    elif os.path.isdir(src):
        shutil.copytree(src, dst, **kwargs)
    else:
        shutil.copy(src, dst, **kwargs)
    return True
