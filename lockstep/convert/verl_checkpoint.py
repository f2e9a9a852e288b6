"""The weights of verl's FSDP checkpoints: `model_world_size_W_rank_R.pt`, one file per rank, with a DTensor per parameter.

    files of all ranks (memory-mapped) ─► whole tensors, one at a time ─► Hugging Face folder

The files are pickles. torch reads them with `weights_only=True` and stand-ins for the few classes that a DTensor consists of: no
class of torch.distributed is created, and files of other torch versions are read too.
"""

import json
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals, safe_globals

from lockstep.engines.train.shard_reader import DAMAGE
from lockstep.kernels.linear import Adapter
from lockstep.models.lora import merged
from lockstep.utils.model_path import ADAPTER_CONFIG, ADAPTER_FOLDER

_SHARD_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_LORA_A, _LORA_B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
_PEFT_PREFIX = "base_model.model."


class _DTensor(Tensor):
    """Stands in for a DTensor: `_local_tensor` and `_spec` are set by the unpickler."""

    _local_tensor: Tensor
    _spec: Any

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} of a sharded tensor")


class _Record:
    """Stands in for a class whose attributes are data."""

    def __new__(cls, *args: Any) -> "_Record":
        return super().__new__(cls)


def _record(name: str) -> type:
    return type(name, (_Record,), {})


_TENSOR = "torch.distributed.tensor"
_OLD = "torch.distributed._tensor"
_RECORDS = {
    name: _record(name) for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry", "DeviceMesh", "_MeshLayout")
}
_RECORDS |= {name: _record(name) for name in ("_FlatLayout", "Shard", "Replicate", "Partial", "_StridedShard")}
_MODULES = {
    **dict.fromkeys(
        ("Shard", "Replicate", "Partial", "_StridedShard"), (f"{_TENSOR}.placement_types", f"{_OLD}.placement_types")
    ),
    **dict.fromkeys(
        ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
        (f"{_TENSOR}._dtensor_spec", f"{_OLD}._dtensor_spec", f"{_OLD}.placement_types"),
    ),
    "DeviceMesh": ("torch.distributed.device_mesh", f"{_OLD}.device_mesh"),
    "_MeshLayout": ("torch.distributed._mesh_layout",),
    "_FlatLayout": ("torch.distributed._mesh_layout",),
}
_STAND_INS: list[Any] = [
    (_DTensor, f"{module}.DTensor") for module in (_TENSOR, f"{_TENSOR}._api", _OLD, f"{_OLD}.api")
]
_STAND_INS += [(_RECORDS[name], f"{module}.{name}") for name, modules in _MODULES.items() for module in modules]


class VerlCheckpoint:
    """The folder of a role (`global_step_N/actor`), as verl writes it with FSDP1 or FSDP2.

    notices: what the converted folder lacks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notices: list[str] = []
        self._ranks = [_load(file) for file in _shard_files(folder)]
        first = self._ranks[0]
        for rank, state in enumerate(self._ranks):
            if odd := state.keys() ^ first.keys():
                raise ValueError(f"{folder}: ranks 0 and {rank} have different tensors ({min(odd)})")
        self.is_lora = any(name.endswith(_LORA_A) for name in first)
        self.is_scalar = any(_plain_name(name) == "score.weight" for name in first)
        if lacks := [name for name in first if _plain_name(name).startswith(("v_head", "pretrained_model"))]:
            raise ValueError(f"{folder}: {lacks[0]} is of a value head of trl, which is not supported")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by their names in a Hugging Face folder; adapters are merged in float32."""
        scale = self._lora_scale() if self.is_lora else 0.0
        tied = self._is_tied()
        for name in self._ranks[0]:
            plain = _plain_name(name)
            if ".lora_" in name or (tied and plain == "lm_head.weight"):
                continue
            if plain == "score.bias":
                self.notices.append(
                    f"score.bias={self._whole(name).item():.3g} is left out: value heads have no bias here"
                )
                continue
            tensor = self._whole(name)
            if _BASE in name and plain.endswith(".weight"):
                module = name.partition(_BASE)[0]
                tensor = merged(tensor, Adapter(self._whole(module + _LORA_A), self._whole(module + _LORA_B), scale))
            yield plain, tensor

    def _whole(self, name: str) -> Tensor:
        try:
            return self._joined(name)
        except DAMAGE as error:
            raise ValueError(f"{self.folder}: the shards of {name} do not fit together: {error}") from error

    def _joined(self, name: str) -> Tensor:
        whole = self._ranks[0][name]
        if not isinstance(whole, _DTensor):
            return whole
        placements = whole._spec.placements
        dims = [number for number, placement in enumerate(placements) if type(placement) is _RECORDS["Shard"]]
        kinds = {type(placement).__name__ for placement in placements}
        if len(dims) > 1 or not kinds <= {"Shard", "Replicate"}:
            raise ValueError(f"placements {', '.join(sorted(kinds))} over {len(dims)} dimensions are not supported")
        if not dims:
            return whole._local_tensor
        (mesh_dim,) = dims
        shards: dict[int, Tensor] = {}
        for rank, state in enumerate(self._ranks):
            part = cast(_DTensor, state[name])
            coordinates = _coordinates(part, rank)
            if all(place == 0 for number, place in enumerate(coordinates) if number != mesh_dim):
                shards[coordinates[mesh_dim]] = part._local_tensor
        joined = torch.cat([shards[place] for place in sorted(shards)], dim=placements[mesh_dim].dim)
        if joined.shape != whole.shape:
            raise ValueError(f"they have {tuple(joined.shape)} together instead of {tuple(whole.shape)}")
        return joined

    def _lora_scale(self) -> float:
        file = self.folder / ADAPTER_FOLDER / ADAPTER_CONFIG
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} does not give r and lora_alpha, which are needed to merge the adapter") from error
        if rank < 1 or config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
            raise ValueError(f"{file}: only plain LoRA (r, lora_alpha, use_rslora) is merged; use --adapter")
        return alpha / (rank**0.5 if config.get("use_rslora") else rank)

    def _is_tied(self) -> bool:
        """Whether the embedding is stored a second time as the head."""
        names = {_plain_name(name): name for name in self._ranks[0]}
        both = [names.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight")]
        if None in both:
            return False
        file = self.folder / "huggingface" / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return bool(config.get("tie_word_embeddings")) and torch.equal(*(self._whole(cast(str, name)) for name in both))


def _shard_files(folder: Path) -> list[Path]:
    """The files of all ranks, in their order."""
    sizes: dict[int, dict[int, Path]] = {}
    for file in folder.iterdir():
        if match := _SHARD_FILE.fullmatch(file.name):
            sizes.setdefault(int(match[1]), {})[int(match[2])] = file
    if len(sizes) != 1:
        found = f"of {' and '.join(map(str, sorted(sizes)))} ranks" if sizes else "none"
        raise ValueError(
            f"{folder} must have the files model_world_size_W_rank_R.pt of one number W of ranks, but has {found}"
        )
    ((world_size, files),) = sizes.items()
    if missing := [rank for rank in range(world_size) if rank not in files]:
        raise ValueError(f"{folder} lacks model_world_size_{world_size}_rank_{missing[0]}.pt")
    return [files[rank] for rank in range(world_size)]


def _load(file: Path) -> dict[str, Tensor]:
    try:
        with _only_stand_ins():
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it holds {name[1]}" if name else str(error).splitlines()[0]
        raise ValueError(f"{file} is not a model shard of verl with DTensors: {what}") from error
    except (*DAMAGE, OSError) as error:
        raise ValueError(f"{file} cannot be read: {(str(error) or repr(error)).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} is not a model shard of verl: it does not hold tensors by name")
    return {str(name): value for name, value in state.items()}


@contextmanager
def _only_stand_ins() -> Iterator[None]:
    """The classes that importing torch.distributed.tensor allows have the same names."""
    before = get_safe_globals()
    clear_safe_globals()
    try:
        with safe_globals(_STAND_INS):
            yield
    finally:
        add_safe_globals(before)


def _coordinates(tensor: _DTensor, rank: int) -> list[int]:
    """The rank's coordinates in the tensor's mesh."""
    found = getattr(tensor._spec.mesh, "_coordinate_on_dim", None)
    if found is not None:
        return list(found)
    if len(tensor._spec.placements) > 1:
        raise ValueError("the shards do not say which part of the device mesh they are of")
    return [rank]


def _plain_name(name: str) -> str:
    return name.removeprefix("_orig_mod.").removeprefix(_PEFT_PREFIX).replace(_BASE, ".")
