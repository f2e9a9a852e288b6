"""verl.utils.model"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig

from lockstep.data.tensors import compute_position_id_with_mask

__all__ = ["compute_position_id_with_mask", "get_generation_config", "print_model_size", "update_model_config"]

logger = logging.getLogger(__name__)


def update_model_config(module_config: PretrainedConfig, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set values of a model's config, in nested configs too."""
    for name, value in override_config_kwargs.items():
        if isinstance(value, Mapping):
            update_model_config(getattr(module_config, name), value)
        else:
            setattr(module_config, name, value)


def print_model_size(model: torch.nn.Module, name: str | None = None) -> None:
    """Log the number of parameters."""
    count = sum(parameter.numel() for parameter in model.parameters())
    logger.info("%s has %.2f M parameters", name or type(model).__name__, count / 1e6)


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """The generation config in a model's folder; None without one."""
    try:
        return GenerationConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except OSError:
        return None
