"""What `lockstep export` reads: a Hugging Face folder, the shards of a checkpoint, or an adapter on its base model.

Each source writes its weights and yields them again for the comparison, one tensor at a time; only an adapter is merged into a
whole model in memory, in float32, by peft.
"""

import copy
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from lockstep.config.model import HFModelConfig
from lockstep.engines.train.shard_reader import ShardTensors
from lockstep.export.outputs import own_outputs, plain_outputs
from lockstep.models.export import save_policy, save_scalar_model, save_tensors
from lockstep.models.four_bit import linears_to_quantize, rounded_to_4bit
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.loading import load_causal_lm, load_hf_config, load_reward_model, meta_model
from lockstep.models.lora import SCORE_HEAD, file_name
from lockstep.models.lora_identity import trained_on_4bit_base
from lockstep.models.rope import fix_rope
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.models.vision import auto_class, body_of
from lockstep.models.weight_source import FolderWeights, Place, safetensors_files, untie
from lockstep.utils.hub import has_tokenizer
from lockstep.utils.model_path import base_folder, local_model_folder

ADAPTER_WEIGHTS = "adapter_model.safetensors"
HOST = torch.device("cpu")
_NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt")


class Source(ABC):
    """Weights to export.

    is_scalar: a critic or reward model, which has a head to one number instead of a language-model head.
    tokenizer: of the text that the check is computed on.
    own_dtype: that `--dtype keep` writes; None is that of each tensor.
    """

    is_scalar: bool
    num_parameters: int
    tokenizer: PreTrainedTokenizerBase
    own_dtype: torch.dtype | None = None

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by the names of the exported folder, in their own dtype."""

    @abstractmethod
    def outputs(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs (L - 1) of each row's tokens, or scores, in float32; call this before `write`."""

    @abstractmethod
    def write(self, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
        """dtype: None keeps that of each tensor."""


class HuggingFaceFolder(Source):
    """A folder with safetensors files: the tensors are copied by name, the other files as they are."""

    def __init__(self, folder: Path, trust_remote_code: bool) -> None:
        self._config = HFModelConfig(path=str(folder), trust_remote_code=trust_remote_code)
        self._folder = folder
        self._files = safetensors_files(folder)
        if not self._files:
            raise ValueError(f"{folder} has no safetensors files")
        shapes = self._shapes()
        self.is_scalar = "score.weight" in shapes
        self.num_parameters = sum(map(math.prod, shapes.values()))
        self.tokenizer = hf_tokenizer(folder, trust_remote_code, key="CHECKPOINT")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in self._files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)

    def outputs(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        if self.is_scalar:
            model: TokenModel = ScalarModel(*load_reward_model(self._config, "export", torch.float32, HOST))
        else:
            model = PolicyModel(load_causal_lm(self._config, "export", torch.float32, HOST))
        return own_outputs(model, rows)

    def write(self, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
        save_tensors(cast_all(self.tensors(), dtype), folder, file_bytes)
        for file in self._folder.iterdir():
            if file.is_file() and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, folder / file.name)
        if dtype is not None:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            config["dtype"] = dtype_name(dtype)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _shapes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for file in self._files:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        return found


class Shards(Source):
    """The shards of a checkpoint, in the architecture of the model that the run started from.

    base: that model, with the run's changes to its config.
    """

    def __init__(self, folder: Path, base: HFModelConfig) -> None:
        self._shards = ShardTensors(folder)
        self._folder, self._base = folder, base
        if not self._shards.entries:
            raise ValueError(f"{folder} has no model weights: it was saved without `model` in checkpoint.save_contents")
        self.is_scalar = "score.weight" in self._shards.entries
        self.num_parameters = sum(entry.size.numel() for entry in self._shards.entries.values())
        self.tokenizer = hf_tokenizer(
            base.tokenizer_path or base.path, base.trust_remote_code, base.custom_chat_template, key="model.path"
        )
        self._config = load_hf_config(base, "model")
        self._token_model = self._meta(self._dtype())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names(self._token_model):
            yield self._token_model.hf_name(name), self._shards.read(name)

    def outputs(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        model = self._meta(torch.float32)
        prefix = "body." if isinstance(model, ScalarModel) else "model."
        places = {name.removeprefix(prefix): Place(self._folder, name) for name in self._names(model)}
        weights = _ShardWeights(places, self._shards.read)
        weights.fill_buffers(model.transformer, HOST)
        install_decoder_layers(model.transformer)
        fix_rope(model.transformer, None)
        weights.fill(model.transformer, HOST)
        if isinstance(model, ScalarModel):
            weights.within("score").fill(model.score, HOST)
        return own_outputs(model, rows)

    def write(self, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
        model = self._meta(dtype or self._dtype())
        weights = cast_all(self.tensors(), dtype)
        if isinstance(model, ScalarModel):
            save_scalar_model(model.body, weights, self.tokenizer, folder, file_bytes)
        else:
            save_policy(model.transformer, weights, self.tokenizer, folder, file_bytes)

    def _meta(self, dtype: torch.dtype) -> TokenModel:
        """The model without memory, with the shapes and ties of the shards."""
        config = copy.deepcopy(self._config)
        config.dtype = dtype
        whole = meta_model(auto_class(config), config, dtype, trust_remote_code=self._base.trust_remote_code)
        if self.is_scalar:
            head = nn.Linear(config.get_text_config().hidden_size, 1, bias=False, dtype=dtype, device="meta")
            model: TokenModel = ScalarModel(body_of(whole), head)
        else:
            self._set_generation_config(whole)
            model = PolicyModel(whole)
        self._match_shards(model, dtype)
        return model

    def _set_generation_config(self, model: PreTrainedModel) -> None:
        folder = local_model_folder(self._base.path, "model.path", weights=False)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)

    def _match_shards(self, model: TokenModel, dtype: torch.dtype) -> None:
        """Untie parameters that the shards have twice; ValueError if the shards are of another model."""
        every = dict(model.named_parameters(remove_duplicate=False))
        for name in every.keys() - dict(model.named_parameters()).keys():
            if name in self._shards.entries:
                untie(model, name, dtype)
                model.transformer.all_tied_weights_keys.pop(model.hf_name(name), None)
        shapes = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in self._names(model)
        }
        held = {name: tuple(entry.size) for name, entry in self._shards.entries.items()}
        for name in sorted(shapes.keys() ^ held.keys()) or sorted(n for n in held if held[n] != shapes[n]):
            what = "only one of them has" if name not in shapes or name not in held else "different shapes of"
            raise ValueError(
                f"{self._folder} does not fit the model {self._base.path}: {what} {name}; give the run's base model by --model"
            )

    def _names(self, model: TokenModel) -> list[str]:
        """Parameters, tied ones once, then the buffers that are saved."""
        saved = model.state_dict()
        return [
            *(name for name, _ in model.named_parameters()),
            *(name for name, _ in model.named_buffers() if name in saved),
        ]

    def _dtype(self) -> torch.dtype:
        return next(e.properties.dtype for e in self._shards.entries.values() if e.properties.dtype.is_floating_point)


class _ShardWeights(FolderWeights):
    """Fills a model from shards. read: the tensor of that name."""

    def __init__(self, places: dict[str, Place], read: Callable[[str], Tensor]) -> None:
        super().__init__(places)
        self._read_whole = read

    def _slice(self, place: Place) -> Any:
        return self._read_whole(place.key)


class Adapter(Source):
    """A LoRA adapter and its base model, merged by peft in float32. base: None is the one that the adapter names.

    The adapter of a critic or reward model has the head with it. One that was trained on a base in 4 bits is merged into that.
    """

    def __init__(self, folder: Path, base: str | None, trust_remote_code: bool) -> None:
        try:
            from peft import PeftModel, get_peft_model_state_dict
        except ModuleNotFoundError as error:
            raise ValueError(
                "merging a LoRA adapter needs peft; pip install peft, or copy the adapter by --adapter"
            ) from error
        stored = load_file(folder / ADAPTER_WEIGHTS).keys()
        self.is_scalar = file_name(SCORE_HEAD) in stored
        whole_folder = local_model_folder(base, "--model") if base else base_folder(folder, "CHECKPOINT")
        config = HFModelConfig(path=str(whole_folder), trust_remote_code=trust_remote_code)
        with_tokenizer = folder if has_tokenizer(folder) else whole_folder
        self.tokenizer = hf_tokenizer(with_tokenizer, trust_remote_code, key="--model")
        hf_config = load_hf_config(config, "--model")
        if self.is_scalar:
            hf_config.num_labels = 1
            hf_config.pad_token_id = self.tokenizer.pad_token_id
        cls: Any = AutoModelForSequenceClassification if self.is_scalar else auto_class(hf_config)
        with _quiet():  # the base has no head; the adapter's is compared below
            whole = cls.from_pretrained(
                whole_folder,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                config=hf_config,
                local_files_only=True,
                weights_only=True,
            )
        of_base: Any = hf_config.dtype
        self.own_dtype = of_base
        if trained_on_4bit_base(folder):
            for linear in linears_to_quantize(whole).values():
                linear.weight.data = rounded_to_4bit(linear.weight.data)
        self._peft = PeftModel.from_pretrained(whole, str(folder), local_files_only=True).eval()
        if odd := sorted(get_peft_model_state_dict(self._peft).keys() ^ stored):  # peft only warns
            raise ValueError(f"{folder} does not fit its base model {whole_folder}: {odd[0]} is in one of them only")
        self.num_parameters = sum(parameter.numel() for parameter in whole.parameters())
        self._merged: PreTrainedModel | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        assert self._merged is not None
        saved = self._merged.state_dict()
        yield from self._merged.named_parameters()
        yield from ((name, buffer) for name, buffer in self._merged.named_buffers() if name in saved)

    def outputs(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """With the adapter unmerged."""
        return plain_outputs(self._peft, rows, is_scalar=self.is_scalar)

    def write(self, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
        merged: PreTrainedModel = self._peft.merge_and_unload()
        self._merged = merged
        with torch.device("meta"):
            like = type(merged)._from_config(merged.config, dtype=dtype or torch.float32)
        if not self.is_scalar:
            like.generation_config = merged.generation_config
        save_policy(like, cast_all(self.tensors(), dtype), self.tokenizer, folder, file_bytes)


@contextmanager
def _quiet() -> Iterator[None]:
    """No report of transformers about weights that a folder lacks."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def cast_all(weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, cast(name, tensor, dtype)) for name, tensor in weights)


def cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """ValueError if a value is too large for `dtype`; tensors of integers stay as they are."""
    if dtype is None or not tensor.is_floating_point():
        return tensor.detach()
    out = tensor.detach().to(dtype)
    if bool(tensor.isfinite().all()) and not bool(out.isfinite().all()):
        raise ValueError(f"{name} has values that {dtype_name(dtype)} cannot hold; use --dtype bfloat16")
    return out


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
