"""Load a Hugging Face model from a local folder: as a language model, with a value head, or with a reward head.

folder ──► causal LM  |  (body, value head)  |  (body, reward head)
"""

import importlib
import logging
import os
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from lockstep.config.model import HFModelConfig
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.log_probs import VocabularyHead

logger = logging.getLogger(__name__)
hf_logging.disable_progress_bar()

_DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
_DTYPES |= {"float16": torch.float16, "fp16": torch.float16}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` computes in bfloat16 on CUDA and in float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def model_folder(config: HFModelConfig, key: str) -> Path:
    """The model's folder, checked before anything is loaded. key: the config section it comes from, for the message."""
    folder = Path(os.path.expanduser(config.path))
    if not config.path or not folder.is_dir():
        raise ValueError(f"{key}.path={config.path!r} is not a folder; give the local folder of a Hugging Face model")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}.path={config.path!r} holds no config.json, so it is not a Hugging Face model")
    return folder


def load_hf_config(config: HFModelConfig, key: str) -> PretrainedConfig:
    if config.external_lib:
        importlib.import_module(config.external_lib)
    hf_config = AutoConfig.from_pretrained(model_folder(config, key), trust_remote_code=config.trust_remote_code)
    for name, value in config.override_config.items():
        if not hasattr(hf_config, name):
            raise ValueError(f"{key}.override_config.{name}: {type(hf_config).__name__} has no such setting")
        setattr(hf_config, name, value)
    _turn_dropout_off(hf_config)
    return hf_config


def _turn_dropout_off(hf_config: PretrainedConfig) -> None:
    """A policy that drops units while it is trained is not the one that was sampled: its ratios would be noise."""
    for name, value in list(vars(hf_config).items()):
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, int | float) and value > 0:
            logger.warning(
                "%s=%g of %s is set to 0: dropout would change the log-probs", name, value, hf_config.model_type
            )
            setattr(hf_config, name, 0.0)


def load_causal_lm(config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The language model with its weights in `dtype`, attending through `models/attention.py`."""
    hf_config = load_hf_config(config, key)
    model = _from_pretrained(AutoModelForCausalLM, config, hf_config, key, dtype, device)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{key}.path={config.path!r}: {type(model).__name__} has no language-model head")
    return model


def load_value_model(
    config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[PreTrainedModel, nn.Linear]:
    """A critic's body and head: the folder's own `score` head, or a fresh one near zero drawn from `seed`."""
    hf_config = load_hf_config(config, key)
    body = _from_pretrained(AutoModelForCausalLM, config, hf_config, key, dtype, device).get_decoder()
    score = nn.Linear(hf_config.get_text_config().hidden_size, 1, bias=False, dtype=dtype, device=device)
    saved = _saved_score_head(Path(os.path.expanduser(config.path)))
    if saved is None:
        fresh = torch.randn(score.weight.shape, generator=torch.Generator().manual_seed(seed))
        saved = fresh / score.weight.shape[1]
    with torch.no_grad():
        score.weight.copy_(saved)
    return body, score


def load_reward_model(
    config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, nn.Linear]:
    """A sequence classifier with one label; a folder without such a head is refused, since a random one scores nonsense."""
    hf_config = load_hf_config(config, key)
    if _saved_score_head(Path(os.path.expanduser(config.path))) is None:
        raise ValueError(f"{key}.path={config.path!r} has no one-label `score` head, so it is not a reward model")
    hf_config.num_labels = 1
    model = _from_pretrained(AutoModelForSequenceClassification, config, hf_config, key, dtype, device)
    return cast(PreTrainedModel, model.base_model), cast(nn.Linear, model.score)


def logits_fn(model: PreTrainedModel) -> VocabularyHead:
    """Hidden states -> logits, with the final soft-capping or scaling that some architectures apply after the head."""
    config = model.config.get_text_config()
    return VocabularyHead(
        model.get_output_embeddings(),
        factor=getattr(config, "logit_scale", None),
        divisor=getattr(config, "logits_scaling", None),
        cap=getattr(config, "final_logit_softcapping", None),
    )


def _from_pretrained(
    cls: Any, config: HFModelConfig, hf_config: PretrainedConfig, key: str, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    folder = model_folder(config, key)
    try:
        model: PreTrainedModel = cls.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{key}.path={config.path!r} cannot be loaded: {error}") from error
    nn.Module.to(model, device)
    return model


def _saved_score_head(folder: Path) -> Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if "score.weight" in tensors.keys():  # noqa: SIM118
                weight: Tensor = tensors.get_tensor("score.weight")
                return weight if weight.shape[0] == 1 else None
    return None
