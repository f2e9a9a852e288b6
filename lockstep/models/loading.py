"""Load a Hugging Face model: as a language model, with a value head, or with a reward head.

folder ──► causal LM  |  (body, value head)  |  (body, reward head)      with our decoder layers if the architecture is known

The folder of a peft adapter loads its base model with the adapter merged.

`open_…` gives the model without memory for its parameters, and where their values come from: the engine that shards the model
fills this rank's shards. All ranks call it together. `load_…` gives the whole model to this process.
"""

import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging as hf_logging

from lockstep.config.model import HFModelConfig, TrainEngineConfig
from lockstep.kernels.linear import Adapter
from lockstep.models.experts import experts_implementation
from lockstep.models.four_bit import linears_to_quantize, rounded_to_4bit, use_4bit_linears
from lockstep.models.known_models import attention_implementation, install_decoder_layers, why_own_forward
from lockstep.models.lora import merged, read_adapter
from lockstep.models.lora_identity import trained_on_4bit_base
from lockstep.models.packed_weights import pack_weights
from lockstep.models.rope import fix_rope
from lockstep.models.video_positions import fix_video_positions
from lockstep.models.vision import auto_class, body_of, is_vision
from lockstep.models.weight_source import (
    FolderWeights,
    MergedWeights,
    SentWeights,
    WeightSource,
    find_weights,
    safetensors_files,
)
from lockstep.registry import load_module
from lockstep.utils.distributed import current_rank, current_world_size
from lockstep.utils.model_path import base_folder, is_adapter, local_model_folder

logger = logging.getLogger(__name__)
hf_logging.disable_progress_bar()

_DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
_DTYPES |= {"float16": torch.float16, "fp16": torch.float16}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def trained_dtype(config: HFModelConfig, engine: TrainEngineConfig, device: torch.device) -> torch.dtype:
    """What to open a model in that is trained: the master dtype, or the compute dtype if LoRA freezes it."""
    return resolve_dtype(engine.dtype if config.lora_rank else engine.model_dtype, device)


def model_folder(config: HFModelConfig, key: str) -> Path:
    """The model's folder on this machine, fetched if it is elsewhere; of an adapter, its base. key: its config section, for
    messages."""
    folder = base_folder(local_model_folder(config.path, f"{key}.path"), f"{key}.path")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}.path={config.path!r} holds no config.json, so it is not a Hugging Face model")
    return folder


def load_hf_config(config: HFModelConfig, key: str) -> PretrainedConfig:
    if config.external_lib:
        load_module(config.external_lib)
    hf_config = AutoConfig.from_pretrained(model_folder(config, key), trust_remote_code=config.trust_remote_code)
    for name, value in config.override_config.items():
        if not hasattr(hf_config, name):
            raise ValueError(f"{key}.override_config.{name}: {type(hf_config).__name__} has no such setting")
        setattr(hf_config, name, value)
    turn_noise_off(hf_config)
    if reason := why_own_forward(hf_config):
        logger.warning(
            "%s computes padded rows by its own forward: %s. This is slower than packed tokens.",
            hf_config.model_type,
            reason,
        )
    return hf_config


NOISE = ("dropout", "pdrop", "dropout_prob", "dropout_p", "layerdrop", "layer_drop")
"""Endings of config keys that make the forward random in training mode. Router jitter is off because routers are never in it."""


def turn_noise_off(hf_config: PretrainedConfig) -> None:
    """Set every dropout and layer drop to 0, in nested configs too.

    A policy that drops units while it trains is not the policy that was sampled: its ratios would be noise.
    """
    for name, value in list(vars(hf_config).items()):
        if isinstance(value, PretrainedConfig):
            turn_noise_off(value)
        elif name.endswith(NOISE) and isinstance(value, int | float) and value > 0:
            logger.warning("%s.%s=%g is set to 0: it would change the log-probs", hf_config.model_type, name, value)
            setattr(hf_config, name, 0.0)


def open_causal_lm(
    config: HFModelConfig,
    key: str,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int | None = None,
    *,
    alone: bool = False,
) -> tuple[PreTrainedModel, WeightSource]:
    """The language model in `dtype`. max_length: of the run's sequences, for `fix_rope`; alone: no other rank takes part.

    A critic or reward model is refused: it has no trained language-model head.
    """
    hf_config = load_hf_config(config, key)
    if _has_score_head(config, key):
        raise ValueError(
            f"{key}.path={config.path!r} is a critic or reward model (it has a `score` head), not a language model"
        )
    model, weights = _open(
        _auto_class(config, hf_config, key), config, hf_config, key, dtype, device, alone, max_length
    )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{key}.path={config.path!r}: {type(model).__name__} has no language-model head")
    return model, weights


def open_value_model(
    config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device, seed: int, *, alone: bool = False
) -> tuple[PreTrainedModel, nn.Linear, WeightSource]:
    """A critic's body and head: the folder's `score` head, or a random one near zero from `seed`."""
    hf_config = load_hf_config(config, key)
    model, weights = _open(
        _auto_class(config, hf_config, key), config, hf_config, key, dtype, device, alone, body_only=True
    )
    body = body_of(model)
    score = nn.Linear(hf_config.get_text_config().hidden_size, 1, bias=False, dtype=dtype, device=device)
    saved = _score_head_of_adapter(config, key)
    if saved is None:
        saved = _saved_score_head(model_folder(config, key))
    if saved is None:
        fresh = torch.randn(score.weight.shape, generator=torch.Generator().manual_seed(seed))
        saved = fresh / score.weight.shape[1]
    with torch.no_grad():
        score.weight.copy_(saved)
    return body, score, weights.within(_path_of(body, model))


def open_reward_model(
    config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device, *, alone: bool = False
) -> tuple[PreTrainedModel, nn.Linear, WeightSource]:
    """A sequence classifier with one label. A folder without such a head is refused: a random head scores nonsense."""
    if _score_head_of_adapter(config, key) is not None:
        return open_value_model(config, key, dtype, device, seed=0, alone=alone)
    hf_config = load_hf_config(config, key)
    if _saved_score_head(model_folder(config, key)) is None:
        raise ValueError(f"{key}.path={config.path!r} has no one-label `score` head, so it is not a reward model")
    if is_vision(hf_config):  # transformers has no classifier of it
        return open_value_model(config, key, dtype, device, seed=0, alone=alone)
    hf_config.num_labels = 1
    model, weights = _open(AutoModelForSequenceClassification, config, hf_config, key, dtype, device, alone)
    body, score = cast(PreTrainedModel, model.base_model), cast(nn.Linear, model.score)
    weights.within("score").fill(score, device)
    return body, score, weights.within(_path_of(body, model))


def load_causal_lm(
    config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device, max_length: int | None = None
) -> PreTrainedModel:
    """`open_causal_lm`, filled with the whole weights."""
    return _filled(*open_causal_lm(config, key, dtype, device, max_length, alone=True), device)


def load_reward_model(
    config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, nn.Linear]:
    """`open_reward_model`, filled with the whole weights."""
    body, score, weights = open_reward_model(config, key, dtype, device, alone=True)
    return _filled(body, weights, device), score


def _open(
    cls: Any,
    config: HFModelConfig,
    hf_config: PretrainedConfig,
    key: str,
    dtype: torch.dtype,
    device: torch.device,
    alone: bool,
    max_length: int | None = None,
    body_only: bool = False,
) -> tuple[PreTrainedModel, WeightSource]:
    """body_only: the folder may lack the head."""
    folder = model_folder(config, key)
    adapters = _adapters_to_merge(config, key)
    model = meta_model(cls, hf_config, dtype, trust_remote_code=config.trust_remote_code)
    kept = _path_of(body_of(model), model) if body_only else ""
    with _named(config, key):
        places, reason = find_weights(model, kept, folder, dtype)
    weights: WeightSource
    _check_adapters(model, adapters, f"{key}.path={config.path!r}")
    if places is not None:
        weights = FolderWeights(places)
        if adapters:
            in_4bit = linears_to_quantize(model) if _was_in_4bit(config, key) else {}
            weights = MergedWeights(weights, adapters, in_4bit)
        weights.fill_buffers(model, device)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    elif alone or current_world_size() == 1:
        model = nn.Module.to(_from_pretrained(cls, config, hf_config, key, dtype), device)
        weights = FolderWeights({})
    else:
        if current_rank() == 0:
            logger.info("rank 0 loads the whole of %s on its host and sends it to the others: %s", folder, reason)
        weights = _sent_weights(model, cls, config, hf_config, key, dtype)
        weights.fill_buffers(model, device)
    install_decoder_layers(model)
    if config.load_in_4bit:
        use_4bit_linears(model, dtype)
    fix_rope(model, max_length)
    fix_video_positions(model)
    return model.eval(), weights


def meta_model(cls: Any, hf_config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """A model of the Auto class without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = cls.from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=attention_implementation(hf_config),
            experts_implementation=experts_implementation(hf_config),
            **options,
        )
    return nn.Module.to(model, "meta")  # some tensors are created on the CPU in any case


def _sent_weights(
    model: PreTrainedModel, cls: Any, config: HFModelConfig, hf_config: PretrainedConfig, key: str, dtype: torch.dtype
) -> SentWeights:
    """Rank 0 loads the whole model; if it fails, so do all ranks."""
    whole = None
    error = ""
    used: list[str] = []
    if current_rank() == 0:
        try:
            whole = _from_pretrained(cls, config, hf_config, key, dtype)
            conversions: Any = whole._weight_conversions
            used = [repr(conversion) for conversion in conversions or ()]
            if model.can_generate():
                model.generation_config = whole.generation_config
        except ValueError as failure:
            error = str(failure)
    told: list[Any] = [error, used]
    dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise ValueError(told[0])
    # `save_pretrained` reverts these
    model.__dict__["_weight_conversions"] = [c for c in get_model_conversion_mapping(model) if repr(c) in told[1]]
    return SentWeights(whole)


def _from_pretrained(
    cls: Any, config: HFModelConfig, hf_config: PretrainedConfig, key: str, dtype: torch.dtype
) -> PreTrainedModel:
    with _named(config, key):
        model: PreTrainedModel = cls.from_pretrained(
            model_folder(config, key),
            config=hf_config,
            dtype=dtype,
            attn_implementation=attention_implementation(hf_config),
            experts_implementation=experts_implementation(hf_config),
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            weights_only=True,  # for a folder without safetensors
        )
    if _was_in_4bit(config, key):
        for linear in linears_to_quantize(model).values():
            linear.weight.data = rounded_to_4bit(linear.weight.data)
    for path, adapter in _adapters_to_merge(config, key).items():
        weight = model.get_submodule(path).weight
        weight.data = merged(cast(Tensor, weight.data), adapter)
    return model


def _auto_class(config: HFModelConfig, hf_config: PretrainedConfig, key: str) -> Any:
    """The Auto class for the folder's weights: of a vision model saved without its tower, that of its language model."""
    cls = auto_class(hf_config)
    if not is_vision(hf_config) or _has_tower(model_folder(config, key)):
        return cls
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{key}.path={config.path!r}: its weights have no vision tower, which {hf_config.model_type} needs"
        )
    return AutoModelForCausalLM


def _has_tower(folder: Path) -> bool:
    """Whether the weights in the folder have a vision tower; True if they are not in safetensors files."""
    names: set[str] = set()
    for file in safetensors_files(folder):
        with safe_open(file, framework="pt") as tensors:
            names.update(key for key in tensors.keys())  # noqa: SIM118
    return not names or any("vision" in name or "visual" in name for name in names)


def _adapters_to_merge(config: HFModelConfig, key: str) -> dict[str, Adapter]:
    """The adapters of a `path` that is an adapter's folder."""
    folder = local_model_folder(config.path, f"{key}.path")
    if not is_adapter(folder):
        return {}
    if config.lora_rank:
        raise ValueError(
            f"{key}.path={config.path!r} is an adapter: to go on training it, set {key}.path to its base model and "
            f"{key}.lora_adapter_path to it; {key}.lora_rank=0 trains the merged weights"
        )
    return read_adapter(folder, f"{key}.path={config.path!r}")[0]


def _was_in_4bit(config: HFModelConfig, key: str) -> bool:
    """Whether `path` is an adapter's folder whose base was in 4 bits."""
    return trained_on_4bit_base(local_model_folder(config.path, f"{key}.path"))


def _check_adapters(model: nn.Module, adapters: Mapping[str, Adapter], what: str) -> None:
    modules = dict(model.named_modules())
    for path, adapter in adapters.items():
        shape = tuple(getattr(getattr(modules.get(path), "weight", None), "shape", ()))
        if shape != (adapter.b.shape[0], adapter.a.shape[1]):
            raise ValueError(f"{what}: its adapter of {path} does not fit {type(model).__name__} of its base model")


@contextmanager
def _named(config: HFModelConfig, key: str) -> Iterator[None]:
    """Name the config key in errors of reading the folder."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{key}.path={config.path!r} cannot be loaded: its weights are a pickle that holds more than tensors; convert them "
            "to safetensors"
        ) from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key}.path={config.path!r} cannot be loaded: {error}") from error


def _filled(model: PreTrainedModel, weights: WeightSource, device: torch.device) -> PreTrainedModel:
    weights.fill(model, device)
    pack_weights(model)
    return model


def _path_of(part: nn.Module, model: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is part)


def _score_head_of_adapter(config: HFModelConfig, key: str) -> Tensor | None:
    """The head that was trained with the adapter at `path`."""
    folder = local_model_folder(config.path, f"{key}.path")
    return read_adapter(folder, f"{key}.path={config.path!r}")[1] if is_adapter(folder) else None


def _has_score_head(config: HFModelConfig, key: str) -> bool:
    with _named(config, key):
        head = _score_head_of_adapter(config, key)
        return head is not None or _saved_score_head(model_folder(config, key)) is not None


def _saved_score_head(folder: Path) -> Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if "score.weight" in tensors.keys():  # noqa: SIM118
                weight: Tensor = tensors.get_tensor("score.weight")
                return weight if weight.shape[0] == 1 else None
    return None
