"""A folder that gets its name when it is complete and checked."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.utils.files import fsync_path, fsync_tree
from lockstep.utils.model_path import is_model_folder


class CheckFailed(Exception):
    """The exported folder is not the checkpoint's model."""


def check_target(target: str, overwrite: bool) -> Path:
    """The folder to write; ValueError if it exists and may not be replaced."""
    folder = Path(target).expanduser().absolute()
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return folder
    if not folder.is_dir() or not is_model_folder(folder):
        raise ValueError(f"-o {target} exists and is not a model's folder; choose another name")
    if not overwrite:
        raise ValueError(f"-o {target} exists; add --overwrite to replace it, or choose another name")
    return folder


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder next to `target`, renamed to it when the block ends.

    If the block raises, it is removed; after CheckFailed it is kept as `NAME.rejected`.
    """
    staging = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        _commit(staging, target)
    except CheckFailed as error:
        rejected = target.with_name(f"{target.name}.rejected")
        shutil.rmtree(rejected, ignore_errors=True)
        staging.rename(rejected)
        raise CheckFailed(f"{target} was not written: {error}. What was rejected is in {rejected}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _commit(staging: Path, target: Path) -> None:
    for file in staging.glob("*.safetensors"):  # which safetensors writes for the owner only
        file.chmod(staging.stat().st_mode & 0o666)
    fsync_tree(staging)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    staging.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def size_of(folder: Path) -> str:
    """`14.2 GB in 3 files` of weights."""
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return f"{sum(files) / 1e9:.3g} GB in {len(files)} file{'s' * (len(files) > 1)}"
