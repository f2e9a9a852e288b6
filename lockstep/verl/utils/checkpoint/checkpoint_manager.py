"""verl.utils.checkpoint.checkpoint_manager"""

import os
import time
from datetime import datetime
from pathlib import Path

from lockstep.trainer.checkpoint import TRACKER, CheckpointStore
from lockstep.verl._names import exports

__getattr__ = exports(__name__)

EXPIRATIONS = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Variables in which clouds announce the end of an instance, in seconds since the epoch or as an ISO date."""


def find_latest_ckpt_path(path: str | Path | None, directory_format: str = "global_step_{}") -> str | None:
    """The newest complete checkpoint in a run's folder; None without one."""
    if path is None or not Path(path).expanduser().is_dir():
        return None
    if directory_format != "global_step_{}":
        raise ValueError(f"directory_format={directory_format!r}: checkpoints are named global_step_N")
    found = CheckpointStore(Path(path)).find("auto")
    return None if found is None else str(found[1])


def get_checkpoint_tracker_filename(root_path: str | Path) -> str:
    return str(Path(root_path) / TRACKER)


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether the instance expires before another step and a save would be done; all in seconds."""
    needed = max_steps_duration + save_ckpt_duration + redundant_time
    return any(
        max_steps_duration > 0 and _seconds(value) - time.time() <= needed
        for name in EXPIRATIONS
        if (value := os.environ.get(name))
    )


def _seconds(stamp: str) -> float:
    try:
        return float(stamp)
    except ValueError:
        return datetime.fromisoformat(stamp).timestamp()
