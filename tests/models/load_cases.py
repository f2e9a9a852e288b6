"""What the ranks of `test_weight_source.py` run: loads and exports, and the memory they take."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from lockstep.config.model import FSDPEngineConfig, HFModelConfig
from lockstep.engines.train import sharding
from lockstep.models import export, loading
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel
from lockstep.utils.distributed import current_world_size
from lockstep.utils.host import HostPeak
from tests.tiny import tiny_tokenizer

CPU = torch.device("cpu")
LAYER = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYER_BYTES = 4 * (4 * 1024 * 1024 + 3 * 1024 * 3072)
NUM_LAYERS = 4


def opened(folder: Path, kind: str, dtype: torch.dtype) -> TokenModel:
    """The model as an engine has it: sharded, if there are several ranks, and filled."""
    config = HFModelConfig(path=str(folder))
    model: TokenModel
    if kind == "policy":
        module, weights = loading.open_causal_lm(config, "m", dtype, CPU)
        model = PolicyModel(module)
    elif kind == "value":
        body, score, weights = loading.open_value_model(config, "m", dtype, CPU, seed=3)
        model = ScalarModel(body, score)
    else:
        body, score, weights = loading.open_reward_model(config, "m", dtype, CPU)
        model = ScalarModel(body, score)
    if current_world_size() > 1:
        sharding.shard(model, FSDPEngineConfig(), CPU, dtype)
    weights.fill(model.transformer, CPU)
    return model


def values(folder: Path, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Every parameter and buffer, whole, by its name in a Hugging Face model."""
    model = opened(folder, kind, dtype)
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    return {model.hf_name(name): as_numpy(sharding.whole(tensor.detach())) for name, tensor in tensors}


def as_numpy(tensor: Tensor) -> tuple[str, np.ndarray]:
    return str(tensor.dtype), tensor.detach().float().numpy().copy()


def refusal(folder: Path) -> str:
    try:
        opened(folder, "policy", torch.float32)
    except ValueError as error:
        return str(error)
    return ""


def write_large_model(folder: Path) -> None:
    """Random weights in bfloat16."""
    config = Qwen2Config(vocab_size=512, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False, **LAYER)
    model = loading.meta_model(AutoModelForCausalLM, config, torch.bfloat16)
    export.save_policy(
        model,
        ((name, torch.rand(p.shape).bfloat16()) for name, p in model.named_parameters()),
        tiny_tokenizer(),
        folder,
    )


def memory_of_loading(folder: Path, way: str) -> tuple[int, int]:
    """Bytes of this rank's shards, and the peak while loading."""
    with HostPeak() as peak:
        if way == "by shards":
            model: nn.Module = opened(folder, "policy", torch.float32)
        else:
            config = HFModelConfig(path=str(folder))
            model = PolicyModel(loading.load_causal_lm(config, "m", torch.float32, CPU))
            sharding.shard(model, FSDPEngineConfig(), CPU, torch.float32)
    return shard_bytes(model), peak.num_bytes


def shard_bytes(model: nn.Module) -> int:
    return sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters())


def memory_of_saving(source: Path, target: Path, file_bytes: int) -> int:
    """The peak while the model is exported in files of `file_bytes`."""
    model = opened(source, "policy", torch.float32)
    export.FILE_BYTES = file_bytes
    with HostPeak() as peak:
        export.save_policy(model.transformer, whole(model), tiny_tokenizer(), target)
    return peak.num_bytes


def whole(model: TokenModel) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield model.hf_name(name), sharding.whole(parameter.detach())
