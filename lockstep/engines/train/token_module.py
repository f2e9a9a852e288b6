"""The torch module that an engine trains: a transformers model with its head, its adapters, and where its weights come from."""

import torch

from lockstep.engines.train.train_engine import EngineModel
from lockstep.models.loading import (
    open_causal_lm,
    open_reward_model,
    open_value_model,
    resolve_dtype,
    trained_dtype,
)
from lockstep.models.lora import install_adapters
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel
from lockstep.models.vision import freeze_tower
from lockstep.models.weight_source import WeightSource


def open_token_model(spec: EngineModel, device: torch.device) -> tuple[TokenModel, WeightSource]:
    """The module without memory for its parameters, and the source of their values.

    It has the master dtype if it is trained, else the compute dtype; with LoRA its adapters are trained.
    """
    config = spec.config
    engine = spec.engine
    key = spec.key
    is_trained = spec.optim is not None
    dtype = trained_dtype(config, engine, device) if is_trained else resolve_dtype(engine.dtype, device)
    model: TokenModel
    if spec.kind == "policy":
        transformer, weights = open_causal_lm(config, key, dtype, device, spec.max_length)
        model = PolicyModel(transformer)
    elif spec.kind == "value":
        body, score, weights = open_value_model(config, key, dtype, device, engine.seed)
        model = ScalarModel(body, score)
    else:
        body, score, weights = open_reward_model(config, key, dtype, device)
        model = ScalarModel(body, score)
    if is_trained and config.freeze_vision_tower:
        freeze_tower(model.transformer, key)
    if is_trained:
        masters = resolve_dtype(engine.model_dtype, device)
        install_adapters(model, config, key, dtype=masters, device=device, seed=engine.seed)
    return model, weights
