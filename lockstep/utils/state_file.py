"""Nested state as plain data: JSON, with the tensors in a safetensors file. Loading never runs code.

    {"epoch": 1, "scores": tensor} ──► data.json: {"epoch": 1, "scores": {"$tensor": "0"}}   data.safetensors: "0"

A value that JSON lacks is an object with one key that begins with `$`.
"""

import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor, nn

ALLOWED = "dicts, lists, tuples, sets, numbers, strings, bytes, booleans, None, tensors and numpy arrays"
_JSON = "$json"
"""Name of the tensor with the JSON text, in `to_bytes`."""


def encode(state: Any, owner: str) -> tuple[Any, dict[str, Tensor]]:
    """JSON data and the tensors that it names. owner: who made the state, for the error about a type that is not allowed."""
    tensors: dict[str, Tensor] = {}

    def add(tensor: Tensor) -> str:
        tensors[name := str(len(tensors))] = tensor
        return name

    def convert(value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is bytes:
            return {"$bytes": add(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0))}
        if isinstance(value, np.bool_ | np.number | np.str_):
            return convert(value.item(), path)
        if kind in (list, tuple, set):
            items = [convert(item, f"{path}[{i}]") for i, item in enumerate(value)]
            if kind is set:  # the order of a set differs between processes
                items.sort(key=json.dumps)
            return items if kind is list else {f"${kind.__name__}": items}
        if kind in (dict, OrderedDict):
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: convert(item, f"{path}.{key}") for key, item in value.items()}
            return {"$dict": [[convert(k, path), convert(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested:
            return {"$tensor": add(value.detach())}
        if kind is np.ndarray and value.dtype == object:
            items = [convert(item, f"{path}[{i}]") for i, item in enumerate(value.ravel().tolist())]
            return {"$objects": items, "shape": list(value.shape)}
        if kind is np.ndarray and value.dtype.kind in "biufcmMUS":
            content = (
                torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
            )
            return {"$array": add(content), "dtype": value.dtype.str, "shape": list(value.shape)}
        what = f"an array of {value.dtype}" if kind is np.ndarray else f"a {kind.__module__}.{kind.__qualname__}"
        raise ValueError(f"{owner}: {path.lstrip('.') or 'the state'} is {what}, which cannot be saved; use {ALLOWED}")

    return convert(state, ""), tensors


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`; numpy scalars come back as numbers, tensors on the CPU."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(decode(items, tensors))
        case {"$set": items}:
            return set(decode(items, tensors))
        case {"$dict": pairs}:
            return {decode(key, tensors): decode(item, tensors) for key, item in pairs}
        case {"$tensor": name}:
            return tensors[name]
        case {"$bytes": name}:
            return tensors[name].numpy().tobytes()
        case {"$objects": items, "shape": shape}:
            array = np.empty(len(items), dtype=object)
            for i, item in enumerate(items):
                array[i] = decode(item, tensors)
            return array.reshape(shape)
        case {"$array": name, "dtype": dtype, "shape": shape}:
            return np.frombuffer(bytearray(tensors[name].numpy().tobytes()), dtype=dtype).reshape(shape)
    if any(key.startswith("$") for key in value):
        raise ValueError(f"unknown value {', '.join(value)}")
    return {key: decode(item, tensors) for key, item in value.items()}


def save_state(stem: Path, state: Any, owner: str) -> None:
    """Write `<stem>.json` and, if the state has tensors, `<stem>.safetensors`."""
    plain, tensors = encode(state, owner)
    _json_file(stem).write_text(json.dumps(plain, allow_nan=False))
    if tensors:
        _tensor_file(stem).write_bytes(save_tensors(_own_memory(tensors)))


def load_state(stem: Path) -> Any:
    """The state that `save_state` wrote; ValueError with the file's name if one is not such a file."""
    file = _json_file(stem)
    if not file.exists() and (old := stem.parent / f"{stem.name}.pt").exists():
        return _load_old(old)
    tensors: dict[str, Tensor] = {}
    try:
        if _tensor_file(stem).exists():
            file = _tensor_file(stem)
            tensors = load_tensors(file.read_bytes())
            file = _json_file(stem)
        return decode(json.loads(file.read_bytes()), tensors)
    except (ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{file} is not a state file ({type(error).__name__}: {error})") from error


def has_state(stem: Path) -> bool:
    return _json_file(stem).exists() or (stem.parent / f"{stem.name}.pt").exists()


def to_bytes(state: Any, owner: str) -> bytes:
    """The state as one safetensors file."""
    plain, tensors = encode(state, owner)
    text = torch.frombuffer(bytearray(json.dumps(plain, allow_nan=False).encode()), dtype=torch.uint8)
    return save_tensors(_own_memory(tensors) | {_JSON: text})


def from_bytes(content: bytes) -> Any:
    """The inverse of `to_bytes`; ValueError if the content is something else."""
    try:
        tensors = load_tensors(content)
        return decode(json.loads(tensors.pop(_JSON).numpy().tobytes()), tensors)
    except (ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise ValueError(f"not a state file ({type(error).__name__}: {error})") from error


def _json_file(stem: Path) -> Path:
    return stem.parent / f"{stem.name}.json"


def _tensor_file(stem: Path) -> Path:
    return stem.parent / f"{stem.name}.safetensors"


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU: safetensors refuses tensors that share memory."""
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _load_old(file: Path) -> Any:
    """A state that torch.save wrote in an earlier version; only tensors, numpy arrays and plain data are accepted."""
    multiarray = np._core.multiarray  # type: ignore[attr-defined]
    plain = [
        multiarray._reconstruct,
        multiarray.scalar,
        np.ndarray,
        np.dtype,
        *map(type, map(np.dtype, "?bBhHiIlLqQefd")),
    ]
    try:
        with torch.serialization.safe_globals(plain):
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is not loaded: it holds more than tensors, arrays and plain data") from error
