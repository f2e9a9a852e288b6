"""What the adapters in a checkpoint belong to: their base model and settings, in lora.json next to the shards.

A checkpoint holds adapters without their base: with other weights under them they would be another policy.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.models.four_bit import has_4bit_linears
from lockstep.models.lora import adapter_config, adapter_layers
from lockstep.utils.distributed import current_rank
from lockstep.utils.fingerprint import fingerprint
from lockstep.utils.model_path import LORA_FILE, is_adapter


@dataclass(frozen=True)
class LoraIdentity:
    """base, fingerprint: the base model's path, and its weights in bfloat16; layers: how many have an adapter.

    load_in_4bit: whether the base was in 4 bits.
    """

    base: str
    fingerprint: int
    rank: int
    alpha: float
    layers: int
    load_in_4bit: bool = False


def identity_of(model: PreTrainedModel, base: Iterable[tuple[str, Tensor]]) -> LoraIdentity:
    """base: the frozen parameters, whole."""
    lora = adapter_config(model)
    bits = sum(fingerprint(weight.to(torch.bfloat16)) for _, weight in base)
    layers = len(adapter_layers(model))
    path = str(lora.base_model_name_or_path)
    return LoraIdentity(path, bits, lora.r, lora.lora_alpha, layers, has_4bit_linears(model))


def save_identity(folder: Path, identity: LoraIdentity) -> None:
    if current_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LORA_FILE).write_text(json.dumps(asdict(identity), indent=2) + "\n")


def check_identity(folder: Path, own: LoraIdentity | None) -> None:
    """ValueError if the checkpoint was trained otherwise. own: of the model that is to load it, None without adapters."""
    file = folder / LORA_FILE
    if not file.is_file():
        if own is not None:
            raise ValueError(f"{folder} has no LoRA adapters: all parameters were trained; set model.lora_rank=0")
        return
    saved = _read_identity(file)
    if own is None:
        raise ValueError(f"{folder} has LoRA adapters, without their base; set model.lora_rank={saved.rank}")
    for name, key in {"rank": "lora_rank", "alpha": "lora_alpha", "layers": "target_modules"}.items():
        before, now = getattr(saved, name), getattr(own, name)
        if before != now:
            raise ValueError(f"{folder} was trained with other adapters: {name} {before}, not {now}; see model.{key}")
    if saved.load_in_4bit != own.load_in_4bit:
        wanted = "true" if saved.load_in_4bit else "false"
        raise ValueError(f"{folder} was trained with model.load_in_4bit={wanted}; set the same")
    if saved.fingerprint != own.fingerprint:
        raise ValueError(
            f"{folder} was trained on other base weights, those of {saved.base}, than {own.base} has now; set model.path to "
            "that model"
        )


def trained_on_4bit_base(adapter: Path) -> bool:
    """Whether a checkpoint says so of its adapter's folder; other folders, also adapters from elsewhere, say nothing."""
    file = adapter.parent / LORA_FILE
    return is_adapter(adapter) and file.is_file() and _read_identity(file).load_in_4bit


def _read_identity(file: Path) -> LoraIdentity:
    try:
        return LoraIdentity(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not the description of an adapter: {error}") from error
