"""verl.utils.checkpoint.checkpoint_manager"""

import logging
import os
import random
import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.trainer.run.checkpoint import TRACKER, CheckpointStore
from lockstep.utils.distributed import current_rank, current_world_size
from lockstep.verl._names import exports

logger = logging.getLogger(__name__)

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
    """Whether the instance expires before another step and a save would be done; all in seconds.

    False if the time has passed, no step has been timed yet, or the cloud's variable is no time.
    """
    needed = max_steps_duration + save_ckpt_duration + redundant_time
    left = (_seconds(os.environ[name]) - time.time() for name in EXPIRATIONS if os.environ.get(name))
    return max_steps_duration > 0 and any(0 < seconds <= needed for seconds in left)


def _seconds(stamp: str) -> float:
    """Seconds since the epoch; 0 if it is no time."""
    for read in (float, lambda text: datetime.fromisoformat(text).timestamp()):
        try:
            return read(stamp)
        except ValueError:
            continue
    return 0.0


class BaseCheckpointManager:
    """Base of managers that write one file per rank: which parts they write, how many checkpoints they keep, and the RNG state.

    checkpoint_config: `save_contents` and `load_contents`, of model, optimizer, extra and hf_model.
    """

    CONTENTS = ("model", "optimizer", "extra")

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
    ) -> None:
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.processing_class = processing_class
        self.checkpoint_config = checkpoint_config
        self.checkpoint_save_contents = self._contents("save_contents")
        self.checkpoint_load_contents = self._contents("load_contents")
        self.previous_saved_paths: list[str] = []
        self.rank, self.world_size = current_rank(), current_world_size()

    def _contents(self, name: str) -> list[str]:
        config = self.checkpoint_config
        given = config.get(name) if hasattr(config, "get") else getattr(config, name, None)
        return list(self.CONTENTS if given is None else given)

    should_save_model = property(lambda self: "model" in self.checkpoint_save_contents)
    should_save_optimizer = property(lambda self: "optimizer" in self.checkpoint_save_contents)
    should_save_extra = property(lambda self: "extra" in self.checkpoint_save_contents)
    should_save_hf_model = property(lambda self: "hf_model" in self.checkpoint_save_contents)
    should_load_model = property(lambda self: "model" in self.checkpoint_load_contents)
    should_load_optimizer = property(lambda self: "optimizer" in self.checkpoint_load_contents)
    should_load_extra = property(lambda self: "extra" in self.checkpoint_load_contents)

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define `save_checkpoint`")

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define `load_checkpoint`")

    @staticmethod
    def checkpath(local_path: str | None, hdfs_path: str | None) -> tuple[bool, str]:
        """Whether the path is a local one, and the path."""
        path = local_path if local_path is not None else hdfs_path
        assert path is not None, "local_path or hdfs_path must be set"
        return local_path is not None, path

    @staticmethod
    def local_mkdir(path: str) -> Path:
        folder = Path(path).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def remove_previous_save_local_path(self, path: str | Sequence[str]) -> None:
        for folder in [path] if isinstance(path, str) else path:
            logger.info("removing the checkpoint %s", folder)
            shutil.rmtree(folder, ignore_errors=True)

    def ensure_checkpoint_capacity(self, max_ckpt_to_keep: int | None) -> None:
        """Before a save: remove the oldest so that the new one fits; a single one stays until the new one is complete."""
        if max_ckpt_to_keep and max_ckpt_to_keep > 1:
            self._keep(max_ckpt_to_keep - 1)

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
        """After a save: remove the oldest beyond the limit."""
        self.previous_saved_paths.append(new_path)
        if max_ckpt_to_keep and max_ckpt_to_keep > 0:
            self._keep(max_ckpt_to_keep)

    def _keep(self, number: int) -> None:
        removed, kept = self.previous_saved_paths[:-number], self.previous_saved_paths[-number:]
        self.remove_previous_save_local_path(removed)
        self.previous_saved_paths = kept

    @staticmethod
    def get_rng_state() -> dict[str, Any]:
        """The states of torch, numpy and Python's `random`, as tensors and numbers."""
        algorithm, keys, *counters = np.random.get_state()
        state: dict[str, Any] = {
            "cpu": torch.get_rng_state(),
            "numpy": (algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), *counters),
            "random": random.getstate(),
        }
        return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    @staticmethod
    def load_rng_state(rng_state: dict[str, Any]) -> None:
        torch.set_rng_state(rng_state["cpu"])
        algorithm, keys, *counters = rng_state["numpy"]
        np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *counters))
        version, numbers, gauss = rng_state["random"]
        random.setstate((version, tuple(numbers), gauss))
        if "cuda" in rng_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng_state["cuda"])
