"""Where workers write their part of a checkpoint."""

import socket
from pathlib import Path


def checkpoint_folder(path: str) -> Path:
    """The folder that the controller made; ValueError on a machine that does not see it."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not there on machine {socket.gethostname()}: trainer.default_local_dir must lie on a file system that "
            "all machines share"
        )
    return folder
