"""The checkpoint folder that workers write their part to."""

import socket
from pathlib import Path


def checkpoint_folder(path: str) -> Path:
    """The folder created by the controller; ValueError if this machine does not see it."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} does not exist on machine {socket.gethostname()}: trainer.default_local_dir must be on a file system "
            "shared by all machines"
        )
    return folder
