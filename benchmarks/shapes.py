"""Sizes of the benchmarks' random models: SmolLM2 (135m), Qwen2.5, a Gated DeltaNet hybrid, a mixture of experts, Qwen2.5-VL, and
tiny ones to try the scripts on a CPU."""

from typing import Any


def _sizes(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, key_heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 65536,
    }


def _hybrid(vocabulary: int, width: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Qwen3-Next: Gated DeltaNet in three of four layers. MLPs are dense except in the last layer, because vLLM's class needs a
    block of experts; it does not tie the embeddings either."""
    return {
        "model_type": "qwen3_next",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 2 * head_dim,
        "linear_num_key_heads": width // head_dim,
        "linear_num_value_heads": 2 * width // head_dim,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "mlp_only_layers": list(range(layers - 1)),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner // 2,
        "shared_expert_intermediate_size": inner // 8,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    }


def _mixture(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, key_heads: int, head_dim: int, experts: int
) -> dict[str, Any]:
    """Qwen3-MoE: eight of the experts, `inner` wide, per token."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 8 * inner,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    }


def _vision(text: dict[str, Any], mrope: list[int], depth: int, width: int, inner: int, heads: int) -> dict[str, Any]:
    """Qwen2.5-VL: patches of 14 x 14 pixels, four of them per token; four layers see all patches, the others windows of 8 x 8.

    text: sizes of the language model. mrope: rotary frequencies of time, height and width. The others are of the tower.
    """
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": mrope}
    return {
        "model_type": "qwen2_5_vl",
        "text_config": {k: v for k, v in text.items() if k != "model_type"} | {"rope_parameters": rope},
        "vision_config": {
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_heads": heads,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": list(range(depth // 4 - 1, depth, depth // 4)),
        },
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _sizes(512, 64, 128, 2, 2, 1, True),
    "135m": _sizes(49152, 576, 1536, 30, 9, 3, True),
    "0.5b": _sizes(151936, 896, 4864, 24, 14, 2, True),
    "1.5b": _sizes(151936, 1536, 8960, 28, 12, 2, True),
    "3b": _sizes(151936, 2048, 11008, 36, 16, 2, True),
    "7b": _sizes(152064, 3584, 18944, 28, 28, 4, False),
    "32b": _sizes(152064, 5120, 27648, 64, 40, 8, False),
    "tiny-hybrid": _hybrid(512, 64, 128, 4, 2, 16),
    "hybrid-1.5b": _hybrid(151936, 1536, 6144, 24, 8, 128),
    "tiny-moe": _mixture(512, 64, 32, 2, 4, 2, 16, 16),
    "qwen3-30b-a3b-quarter": _mixture(151936, 2048, 768, 12, 32, 4, 128, 128),
}
"""Name -> model type and sizes of a transformers config."""

VISION_SHAPES: dict[str, dict[str, Any]] = {
    "tiny-vl": _vision(SHAPES["tiny"], [4, 6, 6], 4, 32, 48, 2),
    "qwen2.5-vl-3b": _vision(SHAPES["3b"], [16, 24, 24], 32, 1280, 3420, 16),
}
"""The same of models that read images."""

BFLOAT16_MASTERS = ("7b", "qwen3-30b-a3b-quarter")
"""Shapes whose float32 optimizer does not fit on one device."""


def shape_config(shape: str, **more: Any) -> Any:
    """The transformers config of a shape."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**(SHAPES | VISION_SHAPES)[shape], **more)
    if shape in VISION_SHAPES:
        for name, value in more.items():  # which belong to its language model
            setattr(config.text_config, name, value)
    return config


def zero_logits(model: Any) -> None:
    """Make all tokens equally likely, so that a random model samples the same ones again whatever the rounding.

    Without it, thousands of tokens have almost the same probability: differences of 0.01 in the logits change two of three sampled
    tokens, and no earlier answer would help to draft a later one. All layers compute as before.
    """
    model.model.norm.weight.data.zero_()


def install_layers(model: Any) -> None:
    """Make the model compute as in a run: our attention, experts and layers, and packed weights."""
    from lockstep.models.attention import ATTENTION_NAME
    from lockstep.models.experts import EXPERTS_NAME
    from lockstep.models.known_models import install_decoder_layers
    from lockstep.models.packed_weights import pack_weights

    model.set_attn_implementation(ATTENTION_NAME)
    model.set_experts_implementation(EXPERTS_NAME)
    install_decoder_layers(model)
    pack_weights(model)


def architecture(shape: str) -> str:
    """The transformers causal-LM class of a shape, as `config.json` names it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SHAPES[shape]["model_type"]])


def _experts(width: int, inner: int, experts: int, top_k: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
    }


EXPERT_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _experts(256, 96, 32, 4),
    "qwen3-30b-a3b": _experts(2048, 768, 128, 8),
    "mixtral-8x7b": _experts(4096, 14336, 8, 2),
}
"""Name -> arguments of Qwen3MoeConfig for one block of experts."""
