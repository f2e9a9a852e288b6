"""What a dataset contains, as digests: a resumed run must train on the rows that it was started with.

A dataset with files is described by the SHA-256 of each and of the pixels of its images. Another one is described by its own
`fingerprint` attribute (a string, or a dict of name -> string) or else by a sample of its rows.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.utils.state_file import encode

logger = logging.getLogger(__name__)

SAMPLED_ROWS = 16


def content_of(dataset: Any) -> dict[str, str]:
    """Name -> digest, in the order of the rows; empty if the content cannot be described."""
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return {str(name): str(digest) for name, digest in own.items()} if isinstance(own, dict) else {"data": str(own)}
    name = type(dataset).__name__
    try:
        digests = [_sampled_rows(dataset) for _ in range(2)]
    except ValueError as error:
        problem = str(error)
    else:
        if digests[0] == digests[1]:
            return {f"{SAMPLED_ROWS} rows of {name}": digests[0]}
        problem = "reading a row twice gives different values"
    logger.warning(
        "cannot detect changes to the training data between start and resume: %s; give %s a `fingerprint` attribute, "
        "a string that changes with its content",
        problem,
        name,
    )
    return {}


def image_content(digests: Mapping[int, Sequence[bytes]]) -> dict[str, str]:
    """Of all images, by row: files that rows name may change while the rows stay the same. Empty if there are none."""
    if not digests:
        return {}
    found = hashlib.sha256(b"".join(digest for _, row in sorted(digests.items()) for digest in row))
    return {"images": found.hexdigest()}


def changes(saved: dict[str, str], now: dict[str, str]) -> list[str]:
    """What differs, in words; a file that was moved is the same file."""
    if list(saved.values()) == list(now.values()):
        return []
    changed = [f"the content of {name} has changed" for name in now if name in saved and saved[name] != now[name]]
    added = [f"{name} is new" for name in now if name not in saved and now[name] not in saved.values()]
    gone = [f"{name} is gone" for name in saved if name not in now and saved[name] not in now.values()]
    return changed + added + gone or ["the order of the files has changed"]


def _sampled_rows(dataset: Any) -> str:
    digest = hashlib.sha256()
    for row in np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), SAMPLED_ROWS)).astype(int)).tolist():
        plain, tensors = encode(dataset[row], owner=f"row {row} of {type(dataset).__name__}")
        digest.update(json.dumps(plain).encode())
        for tensor in tensors.values():
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
