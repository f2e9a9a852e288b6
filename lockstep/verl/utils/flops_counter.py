"""verl.utils.flops_counter: model FLOPs of a training step."""

from collections.abc import Sequence
from typing import Any

import torch

PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0}
"""Dense bf16 matmul throughput of data-center GPUs, by a part of their name."""


def get_device_flops(unit: str = "T") -> float:
    """Peak FLOP/s of the current GPU in 10^12 (T), 10^9 (G) or 1 (B: 10^9 too); inf if it is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), float("inf"))
    return peak * {"T": 1, "G": 1e3, "B": 1e3, "M": 1e6}[unit]


class FlopsCounter:
    """FLOPs of a decoder with gated MLPs, from its Hugging Face config: 6 per parameter and token, plus attention."""

    def __init__(self, config: Any) -> None:
        config = getattr(config, "text_config", config)
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        experts = getattr(config, "num_experts_per_tok", None)
        width = config.moe_intermediate_size * experts if experts else config.intermediate_size
        layer = attention + 3 * hidden * width
        self.num_parameters = config.num_hidden_layers * layer + config.vocab_size * hidden
        """Active per token, without the embedding, whose lookup is no product."""
        self.attention_width = config.num_hidden_layers * heads * head_dim

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float, **unused: Any) -> tuple[float, float]:
        """(achieved, peak) TFLOP/s of a forward and backward pass over the sequences in `delta_time` seconds."""
        dense = 6 * self.num_parameters * sum(batch_seqlens)
        attention = 12 * self.attention_width * sum(length * length for length in batch_seqlens)
        return (dense + attention) / delta_time / 1e12, get_device_flops("T")
