"""An engine's checkpoint folder, written by any number of ranks and read by any other number.

shards/               trained parameters and optimizer, by torch.distributed.checkpoint: each rank writes its shards and reads
                      what it needs
extra_rank_N.json     position in the schedule, loss scale and random generators of rank N, the tensors in extra_rank_N.safetensors;
                      a rank without a file reads that of rank 0

Learning rate, betas and weight decay are not part of it: they follow the config of the run that loads it.
"""

import random
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.engines.train.loss_scale import LossScale
from lockstep.engines.train.lr_schedule import go_to_step
from lockstep.engines.train.optimizer import complete_state
from lockstep.engines.train.shard_reader import METADATA, ShardReader, TensorPlanner, plain_errors
from lockstep.utils.distributed import current_rank
from lockstep.utils.progress import waiting
from lockstep.utils.state_file import has_state, load_state, save_state


def save_shards(folder: Path, contents: Collection[str], model: nn.Module, optimizer: Optimizer | None) -> None:
    # before the first step there is no state, and get_optimizer_state_dict would take a step to create it
    stepped = optimizer if optimizer is not None and optimizer.state else None
    if stepped is not None:
        complete_state(stepped)
    write_shards(folder, _state(contents, model, stepped))


def load_shards(folder: Path, contents: Collection[str], model: nn.Module, optimizer: Optimizer | None) -> None:
    state = _state(parts_to_load(folder, contents), model, optimizer)
    read_shards(folder, state)  # tensors are read in place, so this also loads the optimizer
    if "model" in state:
        # not strict: only the first name of a tied parameter is saved. Weights missing from the folder have failed above.
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))


def write_shards(folder: Path, state: dict[str, Any]) -> None:
    """Write the tensors of a state, DTensors by shards. Collective."""
    if state:
        with plain_errors(), waiting("file", str(folder / "shards")):
            dcp.save(state, checkpoint_id=str(folder / "shards"), no_dist=not dist.is_initialized())


def read_shards(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of a state. Collective."""
    if state:
        reader = ShardReader(folder / "shards")
        with plain_errors(), waiting("file", str(folder / "shards")):
            dcp.load(state, storage_reader=reader, planner=TensorPlanner(), no_dist=not dist.is_initialized())


def parts_to_load(folder: Path, contents: Collection[str]) -> list[str]:
    """Of `contents` what the checkpoint has; ValueError if that should include the model and does not."""
    held = _held_parts(folder / "shards")
    if "model" in contents and "model" not in held:
        raise ValueError(f"{folder} has no model weights: it was saved without `model` in checkpoint.save_contents")
    return [part for part in contents if part in held]


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of the trained parameters, and buffers, by name; tied ones once."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    names = {name for name, _ in chain(trained, model.named_buffers())}
    state = get_model_state_dict(model)
    return {name: cast(Tensor, value) for name, value in state.items() if name in names}


def save_extra(folder: Path, schedule: LambdaLR, loss_scale: LossScale) -> None:
    extra = {
        "schedule": {"last_epoch": schedule.last_epoch},
        "loss_scale": loss_scale.state_dict(),
        "rng": _rng_state(),
    }
    save_state(_extra_stem(folder, current_rank()), extra, owner="the training engine")


def load_extra(folder: Path, schedule: LambdaLR, loss_scale: LossScale) -> None:
    """No-op if the checkpoint was saved without `extra`."""
    own, first = _extra_stem(folder, current_rank()), _extra_stem(folder, 0)
    stem = own if has_state(own) else first
    if not has_state(stem):
        return
    extra = load_state(stem)
    try:
        go_to_step(schedule, int(extra["schedule"]["last_epoch"]))
        loss_scale.load_state_dict(extra.get("loss_scale", {}))
        _set_rng_state(extra["rng"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{stem}.json is not the extra state of a rank ({error!r})") from error


def _state(contents: Collection[str], model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if "model" in contents:
        state["model"] = _model_state(model)
    if "optimizer" in contents and optimizer is not None:
        state["optimizer"] = {"state": get_optimizer_state_dict(model, optimizer)["state"]}
    return state


def _held_parts(shards: Path) -> set[str]:
    """Parts of the state that are in a checkpoint's shards."""
    if not (shards / METADATA).is_file():
        return set()
    return {name.partition(".")[0] for name in ShardReader(shards).read_metadata().state_dict_metadata}


def _extra_stem(folder: Path, rank: int) -> Path:
    return folder / f"extra_rank_{rank}"


def _rng_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
