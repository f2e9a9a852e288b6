"""A value model that is not sharded, for tests."""

import torch
from torch import nn
from transformers import PreTrainedModel

from lockstep.config.model import HFModelConfig
from lockstep.models.loading import open_value_model
from lockstep.models.packed_weights import pack_weights


def load_value_model(
    config: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[PreTrainedModel, nn.Linear]:
    """`open_value_model`, filled with the whole weights."""
    body, score, weights = open_value_model(config, key, dtype, device, seed, alone=True)
    weights.fill(body, device)
    pack_weights(body)
    return body, score
