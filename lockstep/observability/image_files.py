"""Images of dumped responses: files in `images/` next to the dump, each once, named by its content."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.utils.data_uri import extension_of
from lockstep.utils.files import atomic_write_bytes, make_private_folder

FOLDER = "images"
NAME = re.compile(rf"{FOLDER}/[0-9a-f]{{32}}\.[a-z]{{3,4}}")
"""Of an image in a row of a dump, relative to the dump's folder."""
MOST_BYTES = 2**30
"""Of all images of a dump folder; later ones are not written."""


def write_images(folder: Path, images: Sequence[Sequence[bytes]]) -> list[list[str]]:
    """Write the files of each row that are not there yet. Returns their names, without those that are beyond the limit."""
    target = folder / FOLDER
    make_private_folder(target)
    with os.scandir(target) as entries:
        there = {entry.name: entry.stat().st_size for entry in entries}
    total = sum(there.values())
    rows: list[list[str]] = []
    for row in images:
        rows.append([])
        for file in row:
            name = f"{hashlib.blake2b(file, digest_size=16).hexdigest()}.{extension_of(file)}"
            if name not in there:
                if total + len(file) > MOST_BYTES:
                    continue
                atomic_write_bytes(target / name, file, sync=False)
                there[name] = len(file)
                total += len(file)
            rows[-1].append(f"{FOLDER}/{name}")
    return rows
