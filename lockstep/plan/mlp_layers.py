"""MLPs in config.json: which layers of a model with experts have a single one, and its size."""

from collections.abc import Mapping
from typing import Any

_DENSE_KINDS = ("mlp", "-")


def dense_inner(text: Mapping[str, Any], size: int) -> int:
    """The size of an MLP whose config.json says `size`: LFM2 shrinks it."""
    if not text.get("block_auto_adjust_ff_dim"):
        return size
    size = 2 * size // 3
    if (factor := text.get("block_ffn_dim_multiplier")) is not None:
        multiple = text.get("block_multiple_of", 256)
        size = -(-int(factor * size) // multiple) * multiple
    return size


def dense_mlps(text: Mapping[str, Any], num_layers: int) -> int:
    """Layers of a model with experts whose MLP has none. text: the decoder's part of config.json."""
    if text.get("model_type") == "nemotron_h":  # a layer is a mixer, an MLP or experts
        kinds = text.get("layers_block_type") or text.get("hybrid_override_pattern") or ()
        return sum(kind in _DENSE_KINDS for kind in kinds)
    if kinds := text.get("mlp_layer_types"):
        return sum(kind == "dense" for kind in kinds)
    if (period := text.get("expert_layer_period")) is not None:
        return sum(index % period != text.get("expert_layer_offset", 0) for index in range(num_layers))
    if (first := text.get("moe_layer_start_index")) is not None:  # ERNIE 4.5
        last, interval = text.get("moe_layer_end_index", -1), text.get("moe_layer_interval", 1)
        experts = range(first, num_layers if last == -1 else min(last + 1, num_layers))
        return num_layers - sum((index + 1) % interval == 0 for index in experts)
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if text.get(key) is not None:
            return int(text[key])
    step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
    return sum(index in dense or (index + 1) % step != 0 for index in range(num_layers))
