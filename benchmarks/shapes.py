"""Sizes of the benchmarks' random models: SmolLM2 (135m), Qwen2.5, blocks of experts, and tiny ones to try the scripts on a CPU."""

from typing import Any


def _sizes(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, key_heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _sizes(512, 64, 128, 2, 2, 1, True),
    "135m": _sizes(49152, 576, 1536, 30, 9, 3, True),
    "0.5b": _sizes(151936, 896, 4864, 24, 14, 2, True),
    "1.5b": _sizes(151936, 1536, 8960, 28, 12, 2, True),
    "3b": _sizes(151936, 2048, 11008, 36, 16, 2, True),
    "7b": _sizes(152064, 3584, 18944, 28, 28, 4, False),
    "32b": _sizes(152064, 5120, 27648, 64, 40, 8, False),
}
"""Name -> arguments of Qwen2Config."""


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
