"""verl.utils.flops_counter: model FLOPs of a training step, by model type, and the peak of the device.

    FLOPs = 6 * parameters that multiply a token * tokens + attention: forward and backward, the causal half of the scores

Parameters count the embedding and the head, active experts and the router; norms and biases do not count.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "MI300X": 1336.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.05,
    "L40": 181.05,
    "A40": 149.7,
    "L20": 119.5,
    "CPU": 0.448,
}
"""Dense half-precision throughput of a device, by a part of its name; a name comes before those that it contains."""
UNITS = {"B": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """Peak FLOP/s of a device, by default this process's, in FLOP/s (B), 10^3 (K) … 10^12 (T), 10^15 (P); inf if not known."""
    if device_name is None:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), float("inf"))
    return peak * 1e12 / UNITS[unit]


@dataclass(frozen=True)
class Cost:
    """
    num_parameters: that multiply each token.
    attention:      multiply-adds of a layer per pair of tokens: heads * (width of keys + width of values) / 2.
    windows:        tokens that each layer attends to; None is all.
    """

    num_parameters: int
    attention: float
    windows: tuple[int | None, ...]

    def flops(self, lengths: Sequence[int]) -> float:
        pairs = sum(n * (n if window is None else min(n, window)) for window in self.windows for n in lengths)
        return 6 * self.num_parameters * sum(lengths) + 6 * self.attention * pairs


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _attention_weights(config: Any) -> int:
    return int(config.hidden_size * _head_dim(config) * 2 * (config.num_attention_heads + config.num_key_value_heads))


def _embeddings(config: Any) -> int:
    return int(2 * config.vocab_size * config.hidden_size)


def _decoder(config: Any, layer_mlp: int, windows: Sequence[int | None] | None = None) -> Cost:
    """A decoder whose layers have the same MLP."""
    layers = config.num_hidden_layers
    parameters = layers * (_attention_weights(config) + layer_mlp) + _embeddings(config)
    width = config.num_attention_heads * _head_dim(config)
    return Cost(parameters, width, tuple(windows or (None,) * layers))


def _dense(config: Any) -> Cost:
    return _decoder(config, 3 * config.hidden_size * config.intermediate_size)


def _mixture(config: Any) -> Cost:
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    return _decoder(config, expert * config.num_experts_per_tok + config.hidden_size * config.num_experts)


def _gpt_oss(config: Any) -> Cost:
    expert = 3 * config.hidden_size * config.intermediate_size
    router = config.hidden_size * config.num_local_experts
    return _decoder(config, expert * config.num_experts_per_tok + router, _windows(config, 128))


def _gemma3(config: Any) -> Cost:
    return _decoder(config, 3 * config.hidden_size * config.intermediate_size, _windows(config, 1024, pattern=6))


def _apertus(config: Any) -> Cost:
    """An MLP without a gate, and norms of queries and keys."""
    norms = config.hidden_size + config.num_key_value_heads * _head_dim(config)
    return _decoder(config, 2 * config.hidden_size * config.intermediate_size + norms)


def _deepseek_v3(config: Any) -> Cost:
    """Latent attention; the first layers are dense."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    key_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    rank = config.q_lora_rank
    queries = heads * key_width * hidden if rank is None else rank * (hidden + heads * key_width)
    latent = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    keys_values = heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    attention = queries + latent + keys_values + heads * config.v_head_dim * hidden
    experts = config.num_experts_per_tok + config.n_shared_experts
    mixture = 3 * hidden * config.moe_intermediate_size * experts + hidden * config.n_routed_experts
    num_dense, layers = config.first_k_dense_replace, config.num_hidden_layers
    dense = 3 * hidden * config.intermediate_size
    parameters = layers * attention + num_dense * dense + (layers - num_dense) * mixture + _embeddings(config)
    return Cost(parameters, heads * (key_width + config.v_head_dim) / 2, (None,) * layers)


def _windows(config: Any, default: int, pattern: int | None = None) -> list[int | None] | None:
    """The window of each layer. pattern: without `layer_types`, every n-th layer attends to all tokens."""
    window = getattr(config, "sliding_window", default)
    types = getattr(config, "layer_types", None)
    if types is None and window and (every := getattr(config, "sliding_window_pattern", pattern)):
        types = ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(config.num_hidden_layers)]
    return None if types is None else [window if kind == "sliding_attention" and window else None for kind in types]


COSTS: dict[str, Callable[[Any], Cost]] = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "mistral", "mimo", "seed_oss", "glm4v", "minicpmv", "minicpmo"), _dense
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _dense),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe"), _mixture),
    "apertus": _apertus,
    "deepseek_v3": _deepseek_v3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
}
"""By the model type of a Hugging Face config; those of vision models are computed for their text part."""


class FlopsCounter:
    """FLOPs of steps of the model with this Hugging Face config; 0 for a model type that is not in `COSTS`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        make = COSTS.get(config.model_type)
        if make is None:
            logger.warning("FLOPs of %s are not known and count as 0; known: %s", config.model_type, ", ".join(COSTS))
        self.cost = None if make is None else make(getattr(config, "text_config", config))

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float, **unused: Any) -> tuple[float, float]:
        """(achieved, peak) TFLOP/s of one device for a forward and backward pass over the sequences in `delta_time` seconds."""
        achieved = 0.0 if self.cost is None else self.cost.flops(batch_seqlens) / delta_time / 1e12
        return achieved, get_device_flops("T")
