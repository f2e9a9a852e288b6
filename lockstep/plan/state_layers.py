"""Layers with a state (recurrence, convolution) in config.json: which they are, their parameters, their state per sequence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STATE_KINDS = ("linear_attention", "mamba", "conv", "recurrent", "M")
_ATTENTION_KINDS = ("full_attention", "attention", "sliding_attention", "*")
_KIND_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")


@dataclass(frozen=True)
class StateLayer:
    """The part of a decoder layer that has a state, in place of attention or next to it.

    parameters:      of its projections, convolution and norms.
    projected:       entries per token of its input projection.
    inner:           entries per token that its output projection takes.
    dtype_entries:   of the state of one sequence, in the dtype that computes.
    float32_entries: of the state of one sequence, in float32.
    """

    parameters: int
    projected: int
    inner: int
    dtype_entries: int
    float32_entries: int

    def num_bytes(self, itemsize: int) -> int:
        """State of one sequence."""
        return self.dtype_entries * itemsize + self.float32_entries * 4

    @property
    def products(self) -> int:
        """Multiplications of a token with the state: it is decayed, written and read."""
        return 3 * self.float32_entries


@dataclass(frozen=True)
class LayerCounts:
    """Layers of each kind; one layer may be of several."""

    attention: int
    state: int
    mlp: int


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks of attention and MLP that several layers use in turn (Zamba).

    number:         of blocks.
    input_width:    entries per token that queries, keys and values are projected from.
    own_parameters: of each layer that uses a block: its output projection and its low-rank adapters of the block.
    """

    number: int
    input_width: int
    own_parameters: int


def shared_blocks(text: Mapping[str, Any], width: int) -> SharedBlocks | None:
    """None for models whose layers have their own blocks."""
    if text.get("model_type") not in ("zamba", "zamba2"):
        return None
    inputs, rank = text.get("attention_hidden_size") or 2 * width, text.get("adapter_rank", 0)
    adapted = rank * (width + 2 * text["intermediate_size"]) if rank else 0
    if text.get("use_shared_attention_adapter"):
        adapted += 3 * rank * 2 * inputs
    return SharedBlocks(text.get("num_mem_blocks", 1), inputs, width * width + adapted)


def with_plain_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """The section `linear_attn_config` of Kimi-Linear, whose layers count from 1, as keys of transformers."""
    section = text.get("linear_attn_config")
    if not isinstance(section, Mapping):
        return dict(text)
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    own = {name: section[key] for key, name in names.items() if key in section}
    return {**text, **own, "attn_layer_indices": [number - 1 for number in section.get("full_attn_layers", ())]}


def state_layer(text: Mapping[str, Any], width: int) -> StateLayer | None:
    """text: the decoder's part of config.json. None for a model without states."""
    for keys, form in _FORMS:
        if all(key in text for key in keys):
            return form(text, width)
    return None


def layer_counts(text: Mapping[str, Any], num_layers: int) -> LayerCounts:
    """Of a model with states; ValueError if config.json does not tell which layers have one."""
    model_type = text.get("model_type")
    if model_type == "falcon_h1":  # attention and Mamba side by side
        return LayerCounts(num_layers, num_layers, num_layers)
    if model_type == "nemotron_h":  # one mixer per layer
        kinds = _kinds(text, num_layers)
        attention, state = _count(kinds, _ATTENTION_KINDS), _count(kinds, _STATE_KINDS)
        return LayerCounts(attention, state, len(kinds) - attention - state)
    kinds = _kinds(text, num_layers)
    state = _count(kinds, _STATE_KINDS)
    shared = _count(kinds, ("hybrid",))  # Zamba: attention, a state and the only MLPs
    return LayerCounts(num_layers - state, state + shared, shared or num_layers)


def _count(kinds: Sequence[str], of: Sequence[str]) -> int:
    return sum(kind in of for kind in kinds)


def _kinds(text: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    for key in _KIND_LISTS:
        if text.get(key):
            return list(text[key])
    attends = None
    if (interval := text.get("full_attention_interval")) is not None:
        attends = [(index + 1) % interval == 0 for index in range(num_layers)]
    elif (period := text.get("attn_layer_period")) is not None:
        attends = [index % period == text.get("attn_layer_offset", 0) for index in range(num_layers)]
    elif (indices := text.get("attn_layer_indices", text.get("full_attn_idxs"))) is not None:
        attends = [index in indices for index in range(num_layers)]
    if attends is None:
        raise ValueError(
            f"config.json of {text.get('model_type')} has no layer_types, so it is not known which layers have a state"
        )
    return ["full_attention" if attention else "linear_attention" for attention in attends]


def _gated_delta(text: Mapping[str, Any], width: int) -> StateLayer:
    heads, kernel = text["linear_num_value_heads"], text.get("linear_conv_kernel_dim", 4)
    keys, values = (
        text["linear_num_key_heads"] * text["linear_key_head_dim"],
        heads * text["linear_value_head_dim"],
    )
    channels, projected = 2 * keys + values, 2 * keys + 2 * values + 2 * heads
    small = 2 * heads + text["linear_value_head_dim"]
    parameters = width * (projected + values) + channels * kernel + small
    return StateLayer(parameters, projected, values, channels * kernel, values * text["linear_key_head_dim"])


def _kimi_delta(text: Mapping[str, Any], width: int) -> StateLayer:
    heads, dim, kernel = text["linear_num_heads"], text["linear_head_dim"], text.get("linear_conv_kernel_dim", 4)
    inner = heads * dim
    gates = 2 * (width * dim + dim * inner) + width * heads
    parameters = 4 * width * inner + gates + 3 * inner * kernel + inner + heads + dim
    return StateLayer(parameters, 5 * inner + heads, inner, 3 * inner * kernel, inner * dim)


def _mamba_2(text: Mapping[str, Any], width: int) -> StateLayer:
    heads, dim = (
        _first(text, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
        _first(text, "mamba_d_head", "mamba_head_dim", "mamba_headdim"),
    )
    groups, state = (
        _first(text, "mamba_n_groups", "mamba_ngroups", "n_groups"),
        _first(text, "mamba_d_state", "ssm_state_size"),
    )
    kernel = _first(text, "mamba_d_conv", "conv_kernel")
    inner = heads * dim
    channels = inner + 2 * groups * state
    projected = inner + channels + heads
    bias = text.get("mamba_conv_bias", text.get("use_conv_bias", True))
    norm = inner if text.get("mamba_rms_norm", True) else 0
    parameters = width * (projected + inner) + channels * (kernel + bool(bias)) + norm + 3 * heads
    return StateLayer(parameters, projected, inner, channels * kernel, inner * state)


def _mamba_1(text: Mapping[str, Any], width: int) -> StateLayer:
    inner, state, kernel = text["mamba_expand"] * width, text["mamba_d_state"], text.get("mamba_d_conv", 4)
    rank = text.get("mamba_dt_rank", "auto")
    rank = -(-width // 16) if rank == "auto" else rank
    parameters = 3 * width * inner + inner * (rank + 2 * state) + rank * inner + inner * (kernel + state + 3)
    return StateLayer(parameters + rank + 2 * state, 2 * inner, inner, inner * kernel, inner * state)


def _short_convolution(text: Mapping[str, Any], width: int) -> StateLayer:
    kernel = text["conv_L_cache"]
    return StateLayer(4 * width * width + width * kernel, 3 * width, width, width * kernel, 0)


def _lightning(text: Mapping[str, Any], width: int) -> StateLayer:
    heads = text["num_attention_heads"]
    dim = text.get("head_dim") or width // heads
    inner = heads * dim
    return StateLayer(5 * width * inner + inner, 4 * inner, inner, inner * dim, 0)


def _first(text: Mapping[str, Any], *names: str) -> int:
    found = next((text[name] for name in names if isinstance(text.get(name), int)), None)
    if found is None:
        raise ValueError(f"config.json of {text.get('model_type')} has no {names[0]}, so its memory cannot be planned")
    return int(found)


_FORMS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], int], StateLayer]], ...] = (
    (("linear_num_value_heads", "linear_key_head_dim"), _gated_delta),
    (("linear_num_heads", "linear_head_dim"), _kimi_delta),
    (("mamba_n_heads",), _mamba_2),
    (("mamba_num_heads",), _mamba_2),
    (("n_mamba_heads", "mamba_headdim"), _mamba_2),
    (("mamba_d_state", "mamba_expand"), _mamba_1),
    (("conv_L_cache",), _short_convolution),
    (("linear_attn_alpha_factor",), _lightning),
)
"""Keys of config.json that tell the kind of state, and its sizes by them."""
