"""Sizes of the benchmarks' random models: those of SmolLM2 (135m) and Qwen2.5, and a tiny one to try the scripts on a CPU."""

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
