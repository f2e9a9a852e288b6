"""verl.utils.checkpoint.fsdp_checkpoint_manager: checkpoints of a program's own sharded module, in verl's layout.

    {path}/model_world_size_{W}_rank_{R}.pt, optim_…, extra_state_…   one of each per rank
    {path}/fsdp_config.json, {path}/huggingface/                      config and tokenizer; weights with `hf_model`

`lockstep convert` reads them. Lockstep's own workers write other files (`save_checkpoint`), which load on any number of ranks.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lockstep.verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from lockstep.verl.utils.fsdp_utils import fsdp_version, get_fsdp_full_state_dict


class FSDPCheckpointManager(BaseCheckpointManager):
    """Checkpoints of a module sharded with `fully_shard`, or of a plain one on a single rank."""

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write the parts of `save_contents`; older checkpoints of this manager beyond `max_ckpt_to_keep` are removed."""
        if local_path is None:
            return
        folder = self.local_mkdir(local_path)
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        if self.should_save_model:
            torch.save(get_model_state_dict(self.model), self._file(folder, "model"))
        if self.should_save_optimizer and self.optimizer is not None:
            torch.save(get_optimizer_state_dict(self.model, self.optimizer), self._file(folder, "optim"))
        if self.should_save_extra:
            torch.save(
                {"lr_scheduler": self._schedule(), "rng": self.get_rng_state()}, self._file(folder, "extra_state")
            )
        self._save_hugging_face(folder)
        self._barrier()
        if self.rank == 0:
            self.register_checkpoint(str(folder), max_ckpt_to_keep)
        self._barrier()

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Read the parts of `load_contents`, which the same number of ranks wrote. The files are read as data."""
        if local_path is None:
            return
        folder = Path(local_path)
        if self.should_load_model:
            set_model_state_dict(self.model, self._read(folder, "model"))
        if self.should_load_optimizer and self.optimizer is not None:
            set_optimizer_state_dict(self.model, self.optimizer, self._read(folder, "optim"))
        if self.should_load_extra:
            extra = self._read(folder, "extra_state")
            self.load_rng_state(extra["rng"])
            if self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        self._barrier()
        if del_local_after_load and self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    def _file(self, folder: Path, part: str) -> Path:
        return folder / f"{part}_world_size_{self.world_size}_rank_{self.rank}.pt"

    def _read(self, folder: Path, part: str) -> Any:
        file = self._file(folder, part)
        if not file.is_file():
            there = sorted(found.name for found in folder.glob(f"{part}_world_size_*.pt")) or "none"
            raise FileNotFoundError(f"{file}: a checkpoint is loaded by as many ranks as wrote it; found {there}")
        return torch.load(file, map_location="cpu", weights_only=True)

    def _schedule(self) -> Any:
        return None if self.lr_scheduler is None else self.lr_scheduler.state_dict()

    def _save_hugging_face(self, folder: Path) -> None:
        state = get_fsdp_full_state_dict(self.model) if self.should_save_hf_model else None
        if self.rank:
            return
        version = fsdp_version(self.model) or 2
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": self.world_size}))
        target, model = folder / "huggingface", self.model
        if self.processing_class is not None:
            self.processing_class.save_pretrained(target)
        if hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
            model.config.save_pretrained(target)
        if state is not None:
            model.save_pretrained(target, state_dict=state)

    def _barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()
