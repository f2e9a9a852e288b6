"""Checkpoints to export and to convert, written by any number of ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from lockstep.engines.train.state import save_shards
from lockstep.trainer.run.checkpoint import CheckpointStore
from lockstep.utils.distributed import current_rank, current_world_size
from tests.models.load_cases import opened


def save_parts(folder: Path, model: Path) -> None:
    """The shards of an actor and a critic that start from `model`."""
    for part, kind in (("actor", "policy"), ("critic", "value")):
        save_shards(folder / part, ["model"], opened(model, kind, torch.float32), None)


def save_as_verl(part: Path, model: Path) -> None:
    """The shards of a policy as verl saves them with FSDP2."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    rank, world_size = current_rank(), current_world_size()
    torch.save(policy.state_dict(), part / f"model_world_size_{world_size}_rank_{rank}.pt")


def write_run(run: Path, base: str, trained: Path, save: Callable[[Path, Path], object] = save_parts) -> Path:
    """A run that started from `base`, with a checkpoint of `trained` at step 3; returns the checkpoint."""

    def write(folder: Path) -> None:
        save(folder, trained)
        section = {"model": {"path": base, "trust_remote_code": True}}
        (folder / "config.yaml").write_text(yaml.safe_dump({"actor_rollout_ref": section, "critic": section}))

    return CheckpointStore(run).save(3, write)


def verl_part(folder: Path, model: Path) -> Path:
    """The folder of a role with the small files that verl writes beside the shards."""
    (folder / "huggingface").mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / "huggingface")
    return folder
