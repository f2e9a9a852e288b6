"""The `global_step_N` folders of a run and their manifests, without torch.

trainer/run/checkpoint.py writes and verifies them; model paths, which may name a run, read them here.
"""

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The manifest, written last.

    step:     the training step, equal to the N of the folder.
    sequence: number of the save in this root. The newest save is resumed, even if the run was resumed from an earlier step
              and older folders have larger step numbers.
    saved_at: unix time, informational.
    files:    path relative to the folder -> size and checksum; every file except the manifest.
    """

    step: int
    sequence: int
    saved_at: float
    files: dict[str, FileEntry]


def checkpoint_folder(path: str) -> Path:
    """The folder that the controller created for the workers' files; ValueError if this machine does not see it."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} does not exist on machine {socket.gethostname()}: trainer.default_local_dir must be on a file system "
            "shared by all machines"
        )
    return folder


def parse_manifest(content: bytes) -> Manifest:
    """A manifest from its JSON; ValueError if it is invalid or names files outside the folder."""
    try:
        raw = json.loads(content)
        files = {name: FileEntry(int(entry["size"]), str(entry["sha256"])) for name, entry in raw["files"].items()}
        manifest = Manifest(int(raw["step"]), int(raw["sequence"]), float(raw["saved_at"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(repr(error)) from error
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it names {name}, which is outside the folder")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; ValueError if it is missing or invalid."""
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a checkpoint manifest ({error})") from error
    if folder.name != f"global_step_{manifest.step}":
        raise ValueError(f"{path} is for step {manifest.step}, but the folder is {folder.name}")
    return manifest


def check_sizes(folder: Path, manifest: Manifest, below: str = "") -> None:
    """ValueError for the first file that is missing or has another size. below: only files under this subfolder."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not name.startswith(below):
            continue
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if (size := path.stat().st_size) != entry.size:
            raise ValueError(f"{path} has {size} bytes, but its manifest says {entry.size}")


def checkpoints_by_age(root: Path) -> list[tuple[int, int, Path]]:
    """(sequence, step, folder) of every `global_step_N`, oldest save first; sequence is -1 without a manifest."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = STEP_FOLDER.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        try:
            sequence = read_manifest(folder).sequence
        except (ValueError, OSError):
            sequence = -1
        found.append((sequence, int(match[1]), folder))
    return sorted(found)
