"""Write a folder that `from_pretrained` opens: a policy as a causal LM, a critic as a one-label sequence classifier.

    whole tensors, one at a time ─► a file of `FILE_BYTES` ─► written, freed ─► … ─► named, with an index if there are several

All ranks gather the tensors together; rank 0 writes them, and holds no more than one file and a layer.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from lockstep.models.processor import copy_processor
from lockstep.utils.distributed import current_rank
from lockstep.utils.progress import waiting

FILE_BYTES = 2 * 10**9
"""A file has no more bytes, unless a layer has."""

WEIGHTS = "model.safetensors"

Weights = Iterable[tuple[str, Tensor]]
"""Whole tensors by their names in a Hugging Face folder, each valid until the next is asked for."""


def as_saved(model: PreTrainedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Parameters of `model` by the names and in the form in which `save_pretrained` writes them, such as one tensor per expert.

    Each is valid until the next is asked for.
    """
    conversions = getattr(model, "_weight_conversions", None) or ()
    joins = any(isinstance(c, WeightConverter) and len(c.target_patterns) > 1 for c in conversions)
    for _, layer in groupby(weights, key=lambda item: _layer(item[0]) if joins else item[0]):
        parameters = {name: weight.clone() if joins else weight for name, weight in layer}
        yield from revert_weight_conversion(model, parameters).items()


def save_policy(
    model: PreTrainedModel,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    file_bytes: int | None = None,
) -> None:
    """Collective: every rank iterates over `weights`. file_bytes: None is `FILE_BYTES`."""
    _save_all(weights, policy_files(model, folder, file_bytes))
    if current_rank() == 0:
        tokenizer.save_pretrained(folder)
        copy_processor(model, folder)


def save_scalar_model(
    body: PreTrainedModel,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    file_bytes: int | None = None,
) -> None:
    """Collective, like `save_policy`. weights: of the body with its prefix, and `score.weight`."""
    save_tensors(weights, folder, file_bytes)
    if current_rank() > 0:
        return
    config = copy.deepcopy(body.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if architecture is not None:
        config.architectures = [architecture]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    copy_processor(body, folder)


def save_tensors(weights: Weights, folder: Path, file_bytes: int | None = None) -> None:
    """The safetensors files alone, with the names as they are. Collective, like `save_policy`."""

    def write(part: dict[str, Tensor], target: Path) -> None:
        with waiting("file", str(target / WEIGHTS)):
            save_file(part, target / WEIGHTS, metadata={"format": "pt"})

    _save_all(weights, WeightFiles(folder, write, file_bytes))


class WeightFiles:
    """The safetensors files of a folder, from tensors that come one after another.

    write: puts tensors into `model.safetensors` of a folder; other files that it writes there are kept too.
    """

    def __init__(
        self, folder: Path, write: Callable[[dict[str, Tensor], Path], object], file_bytes: int | None = None
    ) -> None:
        self._folder = folder
        self._write = write
        self._limit = file_bytes or FILE_BYTES
        self._part: dict[str, Tensor] = {}
        self._layer: dict[str, Tensor] = {}
        self._files: list[Path] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if _layer(name) not in map(_layer, self._layer):
            self._close_layer()
        self._layer[name] = tensor.detach().cpu().contiguous()

    def close(self) -> None:
        self._close_layer()
        if self._part:
            self._flush()
        _name_files(self._files, self._folder)

    def _close_layer(self) -> None:
        if self._part and _bytes(self._part) + _bytes(self._layer) > self._limit:
            self._flush()
        self._part.update(self._layer)
        self._layer.clear()
        if _bytes(self._part) >= self._limit:
            self._flush()

    def _flush(self) -> None:
        target = self._folder / "part"
        target.mkdir(parents=True)
        self._write(self._part, target)
        self._part.clear()
        self._files.append((target / WEIGHTS).replace(self._folder / f"part-{len(self._files)}.safetensors"))
        for other in target.iterdir():
            other.replace(self._folder / other.name)
        target.rmdir()


def policy_files(model: PreTrainedModel, folder: Path, file_bytes: int | None = None) -> WeightFiles:
    """The files of a policy, with its config: `save_policy` without the tokenizer, for one rank."""
    return WeightFiles(folder, lambda part, target: model.save_pretrained(target, state_dict=part), file_bytes)


def _save_all(weights: Weights, files: WeightFiles) -> None:
    """Collective: rank 0 writes."""
    writes = current_rank() == 0
    for name, tensor in weights:
        if writes:
            files.add(name, tensor)
    if writes:
        files.close()


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _layer(name: str) -> str:
    """Path of the layer that a tensor belongs to: transformers may convert the tensors of a layer together."""
    return re.split(r"(?<=\.\d)\.|(?<=\.\d\d)\.|(?<=\.\d\d\d)\.", name, maxsplit=1)[0]


def _name_files(files: list[Path], folder: Path) -> None:
    """Give the files their final names, remove those of an earlier save, and write the index."""
    for stale in [folder / WEIGHTS, folder / f"{WEIGHTS}.index.json", *folder.glob("model-*-of-*.safetensors")]:
        stale.unlink(missing_ok=True)
    if len(files) == 1:
        files[0].replace(folder / WEIGHTS)
        return
    places: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), name)
        file.replace(folder / name)
    size = sum(file.stat().st_size for file in folder.glob("model-*-of-*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n")
