"""The architectures that the engine computes: a Hugging Face config becomes megatron's TransformerConfig.

A model type that is not in the table, and a setting of a known one that the table does not cover, is refused by name. The names and
layouts of the weights are in `weights.py`; the comparison with transformers at load time (`check.py`) checks both.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from lockstep.engines.train.megatron.layers import GatedProduct, PackedCoreAttention, RmsNorm, get_stream_add


@dataclass(frozen=True)
class Family:
    """What differs between architectures.

    qkv_bias:      whether queries, keys and values have a bias; other linear layers have none.
    head_norm:     a norm of each head's queries and keys.
    experts:       the config keys of the number of experts and of an expert's inner size; None for a dense model.
    shared_expert: the config key of the inner size of an expert for all tokens, which has a gate.
    renormalised:  the probabilities of the chosen experts sum to one; None: as `norm_topk_prob` says.
    """

    qkv_bias: bool = False
    head_norm: bool = False
    experts: tuple[str, str] | None = None
    shared_expert: str | None = None
    renormalised: bool | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norm=True),
    "mixtral": Family(experts=("num_local_experts", "intermediate_size"), renormalised=True),
    "qwen2_moe": Family(
        qkv_bias=True,
        experts=("num_experts", "moe_intermediate_size"),
        shared_expert="shared_expert_intermediate_size",
    ),
    "qwen3_moe": Family(head_norm=True, experts=("num_experts", "moe_intermediate_size")),
}
"""`model_type` of a config.json -> its form."""


def _partial_rotation(hf: Any) -> bool:
    return float(hf.rope_parameters.get("partial_rotary_factor") or 1.0) != 1.0


_NOT_COVERED: dict[str, Callable[[Any], bool]] = {
    "hidden_act": lambda hf: hf.hidden_act != "silu",
    "attention_bias": lambda hf: bool(getattr(hf, "attention_bias", False)),
    "mlp_bias": lambda hf: bool(getattr(hf, "mlp_bias", False)),
    "qkv_bias": lambda hf: not getattr(hf, "qkv_bias", True),
    "rope_parameters": _partial_rotation,
    "decoder_sparse_step": lambda hf: getattr(hf, "decoder_sparse_step", 1) != 1,
    "mlp_only_layers": lambda hf: bool(getattr(hf, "mlp_only_layers", None)),
    "quantization_config": lambda hf: getattr(hf, "quantization_config", None) is not None,
}
"""Config keys, and whether their value is one that the table does not cover."""


def family_of(hf: PretrainedConfig, key: str) -> Family:
    """ValueError if this engine does not compute the model. key: its config section, for messages."""
    if hf.model_type not in FAMILIES:
        raise ValueError(
            f"{key}.path: strategy=megatron computes {', '.join(sorted(FAMILIES))}, not {hf.model_type}; set strategy=fsdp for it"
        )
    for name, is_other in _NOT_COVERED.items():
        if is_other(hf):
            raise ValueError(
                f"{key}.path: strategy=megatron does not compute {hf.model_type} with {name}={getattr(hf, name)!r} in its "
                "config.json; set strategy=fsdp for it"
            )
    return FAMILIES[hf.model_type]


def num_experts(hf: PretrainedConfig, family: Family) -> int | None:
    return None if family.experts is None else int(getattr(hf, family.experts[0]))


def window_of(hf: Any) -> int | None:
    """Tokens that a query sees in the layers with a sliding window; None if all layers see everything."""
    window: int | None = getattr(hf, "sliding_window", None)
    if not window:
        return None
    layers = getattr(hf, "layer_types", None)
    if layers is not None:
        return window if "sliding_attention" in layers else None
    return window if getattr(hf, "use_sliding_window", True) else None


def transformer_values(hf: Any, family: Family) -> dict[str, Any]:
    """The fields of TransformerConfig that follow from the model."""
    values: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # that is, the activation of `block_spec`
        "bias_activation_fusion": False,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.head_norm,
        "moe_token_dispatcher_type": "alltoall",  # the one for micro-batches of different lengths
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if family.experts is None:
        return values
    renormalised = hf.norm_topk_prob if family.renormalised is None else family.renormalised
    return values | {
        "num_moe_experts": num_experts(hf, family),
        "moe_ffn_hidden_size": getattr(hf, family.experts[1]),
        "moe_router_topk": hf.num_experts_per_tok,
        # softmax of the chosen logits alone is softmax of all, divided by the sum of the chosen
        "moe_router_pre_softmax": not renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": getattr(hf, family.shared_expert) if family.shared_expert else None,
        "moe_shared_expert_gate": family.shared_expert is not None,
    }


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage: megatron's, with our norm and attention."""
    layer = get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    parts.self_attn_bda = parts.mlp_bda = get_stream_add
    mlps: Any = [parts.mlp]
    if config.num_moe_experts:
        mlps = [parts.mlp.submodules.experts, parts.mlp.submodules.shared_experts]
    for mlp in mlps:
        mlp.submodules.activation_func = GatedProduct
    attention: Any = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), RmsNorm)


def transformer_config(values: dict[str, Any], overrides: dict[str, Any], key: str) -> TransformerConfig:
    """overrides: those of the user, by the field names of TransformerConfig. key: their config section, for messages."""
    known = TransformerConfig.__dataclass_fields__
    for name in overrides:
        if name not in known:
            raise ValueError(f"{key}.{name}: megatron's TransformerConfig has no such field")
        if name in values and name not in _RECOMPUTE and values[name] != overrides[name]:
            raise ValueError(
                f"{key}.{name}={overrides[name]!r}: the model and the parallel sizes make it {values[name]!r}; remove it"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own defaults
            return TransformerConfig(**{**values, **overrides})
    except (ValueError, AssertionError, TypeError) as error:
        raise ValueError(f"{key}: megatron's TransformerConfig refuses these values: {error}") from error


_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""Fields whose default the user may replace."""


def dtype_values(dtype: torch.dtype) -> dict[str, Any]:
    """Compute in `dtype`; the residual stream is float32, as in our own layers."""
    half = dtype != torch.float32
    return {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp32_residual_connection": half,
        "pipeline_dtype": torch.float32,
        "autocast_dtype": dtype,
    }
