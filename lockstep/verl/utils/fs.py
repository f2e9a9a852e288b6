"""verl.utils.fs: files of other file systems, copied to this machine."""

import os

from lockstep.utils.fs import copy_to_local as copy_to_local

copy_local_path_from_hdfs = copy_to_local
"""The older name of `copy_to_local`."""


def is_non_local(path: str) -> bool:
    """Whether the path is a URL: `hdfs://`, `s3://`, ..."""
    return "://" in path


def local_mkdir_safe(path: str) -> str:
    """Create a folder, which other processes may be creating too; returns its absolute path."""
    path = os.path.abspath(os.path.expanduser(path))
    os.makedirs(path, exist_ok=True)
    return path
