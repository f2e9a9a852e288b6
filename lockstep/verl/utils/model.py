"""verl.utils.model"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from lockstep.data.tensors import compute_position_id_with_mask as compute_position_id_with_mask

logger = logging.getLogger(__name__)


def update_model_config(module_config: PretrainedConfig, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set values of a model's config, in nested configs too."""
    for name, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            update_model_config(getattr(module_config, name), value)
        else:
            setattr(module_config, name, value)


SCALES = (("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0))


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config in a model's folder, with values replaced."""
    config: PretrainedConfig = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, override_config_kwargs or {})
    return config


def get_model_size(model: torch.nn.Module, scale: str = "auto") -> tuple[float, str]:
    """The number of parameters in billions (B), millions (M), thousands (K) or ones, and which of them."""
    count = sum(parameter.numel() for parameter in model.parameters())
    for name, size in SCALES:
        if name == scale or (scale == "auto" and count > size):
            return count / size, name
    if scale != "auto":
        raise NotImplementedError(f"scale={scale}: must be one of auto, B, M, K")
    return float(count), ""


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    """Log the number of parameters."""
    count, scale = get_model_size(model)
    logger.info("%s has %.2f%s parameters", name or type(model).__name__, count, scale)


def create_random_mask(
    input_ids: torch.Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> torch.Tensor:
    """An attention mask like `input_ids`: a random number of padding tokens, then a random number of tokens, then padding.

    The ratios are of the row's length; numpy's global random state draws.
    """
    num_rows, length = input_ids.shape
    most, most_left = int(length * max_ratio_of_valid_token), int(length * max_ratio_of_left_padding)
    least = max(1, int(length * min_ratio_of_valid_token))
    if not (0 < max_ratio_of_valid_token <= 1 and 0 <= max_ratio_of_left_padding < 1 and least <= most):
        raise AssertionError(
            "create_random_mask: 0 < max_ratio_of_valid_token <= 1, 0 <= max_ratio_of_left_padding < 1"
        )
    if most + most_left > length:
        raise AssertionError(f"create_random_mask: {most} tokens and {most_left} of padding exceed {length}")
    starts = np.random.randint(0, most_left + 1, num_rows)[:, None]
    ends = starts + np.random.randint(least, most + 1, num_rows)[:, None]
    places = np.arange(length)[None]
    return torch.from_numpy(((places >= starts) & (places < ends)).astype(np.int64)).to(input_ids.device)


def convert_weight_keys(state_dict: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Names of a model's parameters as its checkpoints have them; the inverse of its `_checkpoint_conversion_mapping`."""
    mapping: Mapping[str, str] = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    back = [(re.compile(here), re.sub(r"\(.*\)", "", there.lstrip("^"))) for there, here in mapping.items()]

    def name_in_checkpoint(name: str) -> str:
        for pattern, there in back:
            renamed, count = pattern.subn(there, name)
            if count:
                return renamed
        return name

    return {name_in_checkpoint(name): value for name, value in state_dict.items()}


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """The generation config in a model's folder, or one made from the model's config; None without either."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        pass
    try:
        return GenerationConfig.from_model_config(get_huggingface_actor_config(model, None, trust_remote_code))
    except OSError:
        return None
