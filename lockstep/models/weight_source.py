"""The weights of a model that is built on the meta device: each rank reads the rows that it keeps, and no more.

    folder ─► model without memory ─► sharded by the engine ─► `fill`: rows of this rank's shards ◄─ safetensors files

A folder whose tensors are not the model's parameters one to one (experts to merge, pickled weights, remote code) is loaded whole
by transformers, on the host of rank 0, which sends it to all ranks in pieces.
"""

import copy
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lockstep.kernels.linear import Adapter
from lockstep.models.four_bit import is_4bit, quantized, rounded_to_4bit
from lockstep.models.lora import base_name, merged
from lockstep.models.split_weights import split_of
from lockstep.utils.distributed import current_rank

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**26
"""Most bytes that are read or sent at a time, unless a row has more."""


class Place(NamedTuple):
    """Where a tensor is: a safetensors file and the tensor's name in it."""

    file: Path
    key: str


class WeightSource(ABC):
    """Weights by the names of a Hugging Face model. prefix: of the part of it that is filled."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def within(self, prefix: str) -> "WeightSource":
        """The same weights for the submodule at `prefix`."""
        part = copy.copy(self)
        part._prefix = f"{self._prefix}{prefix}." if prefix else self._prefix
        return part

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Give the parameters of `module` that are on the meta device their memory, on `device`, and their values."""
        filled: dict[Tensor, nn.Parameter] = {}
        split = split_of(module)
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta:
                like, start = _own_rows(parameter)
                shape = parameter.shape
                if split is not None:  # the whole tensor is read, one at a time
                    shape = torch.Size(split.whole_shape(name, parameter))
                    like = torch.empty(shape, dtype=parameter.dtype, device="meta")
                own = torch.empty(like.shape, dtype=like.dtype, device=device)
                self._read(self._prefix + base_name(name), shape, own, start)
                if split is not None:
                    own = split.take(name, own).clone(memory_format=torch.contiguous_format)
                if is_4bit(parameter):
                    _set_parameter(module, name, quantized(own))
                    continue
                if isinstance(parameter, DTensor):  # DTensor.from_local would move it to the device of the mesh
                    own = DTensor(own, parameter._spec, requires_grad=False)
                filled[parameter] = nn.Parameter(own, parameter.requires_grad)
        names = module.named_parameters(remove_duplicate=False)
        state = {name: filled[parameter] for name, parameter in names if parameter in filled}
        module.load_state_dict(state, strict=False, assign=True)
        self.close()

    def read(self, name: str, shape: torch.Size, own: Tensor, start: int) -> None:
        """Copy rows of the tensor `name`, which has that shape, into `own`, from row `start` on. Collective if rank 0 sends it."""
        self._read(self._prefix + name, shape, own, start)

    def close(self) -> None:  # noqa: B027
        """Close the files that are open."""

    @abstractmethod
    def fill_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Compute or read the buffers of the whole model, which are on the meta device."""

    @abstractmethod
    def _read(self, name: str, shape: torch.Size, own: Tensor, start: int) -> None:
        """Copy rows of a tensor of that shape into `own`, from row `start` on."""


class FolderWeights(WeightSource):
    """Read from safetensors files."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        super().__init__()
        self._places = places
        self._files: dict[Path, Any] = {}

    def close(self) -> None:
        self._files.clear()

    def fill_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=device)
        model.initialize_weights()  # parameters are on the meta device: this computes the buffers alone
        for name, buffer in model.named_buffers():
            if name in self._places:
                self._read(name, buffer.shape, buffer, 0)
        self.close()

    def _read(self, name: str, shape: torch.Size, own: Tensor, start: int) -> None:
        tensor = self._slice(self._places[name])
        if not shape:
            own.copy_(tensor[...])
            return
        for first, end in _pieces(own):
            own[first:end].copy_(tensor[start + first : start + end])

    def _slice(self, place: Place) -> Any:
        if place.file not in self._files:
            self._files[place.file] = safe_open(place.file, framework="pt")
        return self._files[place.file].get_slice(place.key)


class SentWeights(WeightSource):
    """Sent by rank 0, which has the whole model on its host. Collective. whole: None on other ranks."""

    def __init__(self, whole: PreTrainedModel | None) -> None:
        super().__init__()
        self._tensors: dict[str, Tensor] | None = None
        if whole is not None:
            self._tensors = dict(chain(whole.named_parameters(), whole.named_buffers(remove_duplicate=False)))

    def fill_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Also gives parameters the type that they have on rank 0, and unties those that it has not tied."""
        told: list[Any] = [{name: tensor.dtype for name, tensor in (self._tensors or {}).items()}]
        dist.broadcast_object_list(told, src=0)
        dtypes: dict[str, torch.dtype] = told[0]
        for path, module in model.named_modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                name = f"{path}.{leaf}" if path else leaf
                module._buffers[leaf] = torch.empty_like(buffer, dtype=dtypes.pop(name), device=device)
                self._read(name, buffer.shape, module._buffers[leaf], 0)
        own = dict(model.named_parameters())
        for name, dtype in dtypes.items():
            if name not in own or own[name].dtype != dtype:
                untie(model, name, dtype)

    def _read(self, name: str, shape: torch.Size, own: Tensor, start: int) -> None:
        whole = torch.empty(shape, dtype=own.dtype, device="meta") if self._tensors is None else self._tensors[name]
        whole, own = torch.atleast_1d(whole.detach()), torch.atleast_1d(own)
        for first, end in _pieces(whole):
            piece = torch.empty_like(whole[first:end], device=own.device, memory_format=torch.contiguous_format)
            if not whole.is_meta:
                piece.copy_(whole[first:end])
            dist.broadcast(piece, src=0)
            low, high = max(first, start), min(end, start + len(own))
            if low < high:
                own[low - start : high - start].copy_(piece[low - first : high - first])


class MergedWeights(WeightSource):
    """Weights with adapters added to them.

    adapters: by the name of their linear layer.
    in_4bit:  linear layers whose weights were in 4 bits when the adapters were trained.
    """

    def __init__(self, base: WeightSource, adapters: Mapping[str, Adapter], in_4bit: Collection[str] = ()) -> None:
        super().__init__()
        self._base = base
        self._adapters = adapters
        self._in_4bit = in_4bit

    def close(self) -> None:
        self._base.close()

    def fill_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        self._base.fill_buffers(model, device)

    def _read(self, name: str, shape: torch.Size, own: Tensor, start: int) -> None:
        layer = name.removesuffix(".weight") if name.endswith(".weight") else ""
        if layer in self._in_4bit:  # rows cannot be quantised alone: all scales of a weight share an offset
            whole = torch.empty(shape, dtype=own.dtype, device=own.device)
            self._base._read(name, shape, whole, 0)
            own.copy_(rounded_to_4bit(whole)[start : start + len(own)])
        else:
            self._base._read(name, shape, own, start)
        if layer in self._adapters:
            own.copy_(merged(own, self._adapters[layer], start))


def find_weights(
    model: PreTrainedModel, kept: str, folder: Path, dtype: torch.dtype
) -> tuple[dict[str, Place] | None, str]:
    """Where the parameters and saved buffers of `model` are in the folder; None and the reason if they are not one to one.

    model: on the meta device; parameters that the folder has not tied are untied. kept: prefix of the parameters that are needed.
    """
    if model.is_custom_code():
        return None, "its code is not part of transformers"
    if getattr(model.config, "quantization_config", None) is not None:
        return None, "it is quantised"
    if model._get_dtype_plan(dtype):
        return None, f"some of its weights stay in float32 while the others are {dtype}"
    files = safetensors_files(folder)
    if not files:
        return None, "its weights are not in safetensors files"
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    expected = model.state_dict()
    places: dict[str, Place] = {}
    unexpected: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
                if name not in expected and key in expected:
                    name = key
                    converted = None
                if converted is not None:
                    return None, f"transformers converts {key} to {name}"
                if name not in expected:
                    shape = tensors.get_slice(key).get_shape()
                    if not (kept and key == "score.weight" and shape[0] == 1):  # the head that `open_value_model` loads
                        unexpected.append(key)
                elif tuple(tensors.get_slice(key).get_shape()) != tuple(expected[name].shape):
                    return None, f"{key} has another shape than {name}"
                else:
                    places[name] = Place(file, key)
    _settle_ties(model, places)
    needed = {name for name, _ in model.named_parameters()} | (
        expected.keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    )
    missing = sorted(name for name in needed - places.keys() if name.startswith(kept))
    if missing:
        return None, f"it lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}"
    # `save_pretrained` reverts these
    model.__dict__["_weight_conversions"] = [transform for transform in transforms if transform.was_used()]
    _warn_unexpected(model, unexpected, folder)
    return places, ""


def _settle_ties(model: PreTrainedModel, places: dict[str, Place]) -> None:
    """Let the first name of tied parameters have a place. Those that the folder has twice, with different values, are untied."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    for parameter, (first, *others) in groups.items():
        held = [name for name in (first, *others) if name in places]
        for name in held[1:]:
            if not _same(places[held[0]], places[name]):
                logger.warning(
                    "%s ties %s to %s, but its folder has different values: they are not tied. Set tie_word_embeddings=false in "
                    "its config.json to silence this.",
                    type(model).__name__,
                    name,
                    held[0],
                )
                untie(model, name, parameter.dtype)
                model.all_tied_weights_keys.pop(name, None)
        if held:
            places[first] = places[held[0]]


def _same(first: Place, second: Place) -> bool:
    with safe_open(first.file, framework="pt") as one, safe_open(second.file, framework="pt") as other:
        a, b = one.get_slice(first.key), other.get_slice(second.key)
        like = torch.empty(a.get_shape(), device="meta")
        return all(torch.equal(a[start:end], b[start:end]) for start, end in _pieces(like))


def _warn_unexpected(model: PreTrainedModel, keys: list[str], folder: Path) -> None:
    known = [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())]
    unknown = [key for key in keys if not any(re.search(pattern, key) for pattern in known)]
    if unknown and current_rank() == 0:
        names = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        logger.warning("%s: tensors that %s does not use: %s", folder, type(model).__name__, names)


def safetensors_files(folder: Path) -> list[Path]:
    """The files of the model's weights; empty if they are in another format."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def untie(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Give `name` its own parameter on the meta device."""
    before = model.get_parameter(name)
    fresh = torch.empty(before.shape, dtype=dtype, device="meta")
    _set_parameter(model, name, nn.Parameter(fresh, before.requires_grad))


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = parameter


def _own_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's shard (on the meta device) and its first row. FSDP2 splits the first dimension into chunks."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    own = parameter.to_local()
    start = 0
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0)
            chunk = -(-len(parameter) // parameter.device_mesh.size(dimension))
            start = min(chunk * parameter.device_mesh.get_local_rank(dimension), len(parameter))
    return own, start


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most `PIECE_BYTES`."""
    rows = max(1, PIECE_BYTES // max(1, tensor.nbytes // max(1, len(tensor))))
    for first in range(0, len(tensor), rows):
        yield first, min(first + rows, len(tensor))
