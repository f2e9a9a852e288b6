"""An engine's checkpoint in the format of `engines/train/state.py`: any layout reads it, and so does the FSDP engine.

masters and moments ── gathered, one tensor at a time ──► kept by one rank each ──► shards/
"""

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lockstep.engines.train.megatron.optimizer import MOMENTS, Masters
from lockstep.engines.train.megatron.weights import Reader, Slice, load_slices
from lockstep.engines.train.shard_reader import METADATA, ShardTensors, plain_errors
from lockstep.utils.distributed import current_rank, current_world_size


def save_state(
    folder: Path, contents: Collection[str], slices: list[Slice], masters: Masters, device: torch.device
) -> None:
    """Collective. Before the first step there is no optimizer state to save."""
    with_moments = "optimizer" in contents and masters.steps > 0
    if "model" not in contents and not with_moments:
        return
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for number, piece in enumerate(slices):
        found: dict[str, Tensor] = {}
        for name in (*["param"] * ("model" in contents), *(MOMENTS if with_moments else ())):
            whole = piece.gathered(partial(masters.value, name=name), torch.float32, device)
            if number % current_world_size() == current_rank():
                found[name] = whole.detach().to("cpu", copy=True)
        if "param" in found:
            weights[piece.name] = found.pop("param")
        if found:
            moments[piece.name] = {"step": torch.tensor(float(masters.steps)), **found}
    state = {"model": weights} if "model" in contents else {}
    with plain_errors():
        dcp.save(
            {**state, **({"optimizer": {"state": moments}} if with_moments else {})},
            checkpoint_id=str(folder / "shards"),
            no_dist=current_world_size() == 1,
        )


def load_state(folder: Path, contents: Collection[str], slices: list[Slice], masters: Masters) -> None:
    """Each rank reads the tensors that it has parts of."""
    shards = folder / "shards"
    has_shards = (shards / METADATA).is_file()
    weights = ShardTensors(shards) if has_shards else None
    if "model" in contents:
        if weights is None or not weights.entries:
            raise ValueError(f"{folder} has no model weights: it was saved without `model` in checkpoint.save_contents")
        load_slices(slices, _from_shards(weights, "{}", folder), masters.set_value)
    moments = ShardTensors(shards, "optimizer") if has_shards else None
    if "optimizer" not in contents or moments is None or not moments.entries:
        return
    for name in MOMENTS:
        load_slices(slices, _from_shards(moments, f"state.{{}}.{name}", folder), partial(masters.set_value, name=name))
    masters.set_steps(int(moments.read(f"state.{slices[0].name}.step")))


def _from_shards(tensors: ShardTensors, form: str, folder: Path) -> Reader:
    """form: the name of an entry, of the slice's name."""

    def read(piece: Slice, own: Tensor, start: int) -> None:
        if not piece.parameters:
            return
        name = form.format(piece.name)
        if name not in tensors.entries or tuple(tensors.entries[name].size) != piece.shape:
            raise ValueError(f"{folder} has no {name} of shape {piece.shape}: it is the checkpoint of another model")
        own.copy_(tensors.read(name)[start : start + len(own)])

    return read
