"""Compare an exported folder with the weights that it was made of: every tensor, then what plain transformers computes with it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from lockstep.export.outputs import plain_outputs
from lockstep.export.sources import cast
from lockstep.export.staging import CheckFailed
from lockstep.models.model_check import BOUNDS
from lockstep.models.vision import auto_class, is_vision
from lockstep.models.weight_source import safetensors_files


@dataclass(frozen=True)
class Difference:
    """Between the outputs (log-probs or scores) of the checkpoint and of the exported folder, in float32.

    limit:  of the mean.
    number: of outputs that were compared.
    """

    largest: float
    mean: float
    limit: float
    number: int


def check_tensors(
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    dtype: torch.dtype | None,
    *,
    is_scalar: bool,
    trust_remote_code: bool = False,
) -> int:
    """The number of `weights`, each of which is in the folder, rounded to `dtype`; CheckFailed otherwise."""
    written = {key: file for file in safetensors_files(folder) for key in _keys(file)}
    number = 0
    converted = dict[str, Tensor]()
    for name, tensor in weights:
        number += 1
        expected = cast(name, tensor, dtype)
        if name not in written:
            converted[name] = expected
            continue
        with safe_open(written.pop(name), framework="pt") as tensors:
            _compare(name, tensors.get_tensor(name), expected)
    if bool(written) != bool(converted):
        only = next(iter(written or converted))
        raise CheckFailed(f"only {'the exported folder' if written else 'the checkpoint'} has {only}")
    if converted:  # transformers stores these under other names or split, such as the experts of a layer
        loaded = load_plain(folder, is_scalar, None, trust_remote_code).state_dict()
        for name, expected in converted.items():
            _compare(name, loaded[name], expected)
    return number


def check_outputs(
    expected: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    folder: Path,
    *,
    is_scalar: bool,
    trust_remote_code: bool = False,
) -> Difference:
    """expected: `outputs(rows)` of the source. CheckFailed if transformers computes something else from the folder."""
    dtype = _stored_dtype(folder)
    model = load_plain(folder, is_scalar, torch.float32, trust_remote_code)
    got = plain_outputs(model, rows, is_scalar=is_scalar)
    ours, theirs = (torch.cat([t.float().flatten() for t in found]) for found in (expected, got))
    scale = float(ours.square().mean().sqrt()) if is_scalar else max(1.0, float(ours.std()))
    errors = (ours - theirs).abs().nan_to_num(float("inf"))
    found = Difference(float(errors.max()), float(errors.mean()), BOUNDS[dtype] * scale, len(errors))
    if not found.mean <= found.limit:
        what = "scores" if is_scalar else "log-probs"
        raise CheckFailed(
            f"transformers computes other {what} from it than the checkpoint: {found.mean:.2g} per token on average, "
            f"{found.largest:.2g} at most, more than rounding ({found.limit:.2g})"
        )
    return found


def load_plain(folder: Path, is_scalar: bool, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    """By transformers alone; dtype: None is the stored one."""
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if is_scalar and is_vision(hf_config):
        raise CheckFailed(f"transformers has no classifier of {hf_config.model_type} that could check it")
    cls = AutoModelForSequenceClassification if is_scalar else auto_class(hf_config)
    model: PreTrainedModel = cls.from_pretrained(
        folder, dtype=dtype or "auto", local_files_only=True, trust_remote_code=trust_remote_code
    )
    return model.eval()


def _compare(name: str, got: Tensor, expected: Tensor) -> None:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise CheckFailed(
            f"{name} is {got.dtype} {tuple(got.shape)} in the exported folder, but should be {expected.dtype} "
            f"{tuple(expected.shape)}"
        )
    if not torch.equal(got, expected):
        largest = float((got.float() - expected.float()).abs().nan_to_num(float("inf")).max())
        raise CheckFailed(f"{name} differs from the checkpoint, by up to {largest:.2g}")


def _keys(file: Path) -> Iterator[str]:
    with safe_open(file, framework="pt") as tensors:
        yield from tensors.keys()


def _stored_dtype(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, name, torch.float32)
    return dtype if dtype in BOUNDS else torch.float32
