"""Which transformers layers `models/decoder_layer.py` and `models/state_layer.py` replace, and how every other model computes.

    layer class in KNOWN_LAYERS, mixer class in KNOWN_MIXERS ─► our layers, on packed tokens
    attention through transformers' AttentionInterface ─► transformers' own layers under our attention function, on packed tokens
    anything else (own attention or masks) ─► its own forward, on rows padded on the right

Whatever is chosen is compared with transformers' eager forward when an engine loads the model (`models/model_check.py`).
"""

from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.attention_variants import install_attention_variants
from lockstep.models.decoder import decoder_of
from lockstep.models.decoder_layer import DecoderLayer, FinalNorm, LayerForm
from lockstep.models.linear_kernels import limit_kernels
from lockstep.models.state_layer import StateForm, StateLayer
from lockstep.models.state_mixer import install_state_mixers
from lockstep.models.stream_layer import StreamLayer

KNOWN_LAYERS: dict[str, LayerForm] = {
    # Llama and its relatives (SmolLM, SmolLM2, Yi, DeepSeek-R1-Distill-Llama, ... are Llama by class)
    "LlamaDecoderLayer": LayerForm(),
    "SmolLM3DecoderLayer": LayerForm(),
    "SeedOssDecoderLayer": LayerForm(),
    "CwmDecoderLayer": LayerForm(),
    "GraniteDecoderLayer": LayerForm(),
    "MistralDecoderLayer": LayerForm(window="config"),
    "MinistralDecoderLayer": LayerForm(),
    "Phi3DecoderLayer": LayerForm(window="config"),
    "Qwen2DecoderLayer": LayerForm(),
    "Qwen3DecoderLayer": LayerForm(),
    # Qwen's vision-language models: their rotary module makes one table of three positions
    "Qwen2VLDecoderLayer": LayerForm(),
    "Qwen2_5_VLDecoderLayer": LayerForm(),
    "Qwen3VLTextDecoderLayer": LayerForm(),
    # Gemma: norms with 1 + weight, from Gemma 2 on also after attention and MLP
    "GemmaDecoderLayer": LayerForm(norm="rms_offset"),
    "Gemma2DecoderLayer": LayerForm(
        norm="rms_offset", order="sandwich", mlp_norm="pre_feedforward_layernorm", softcap=True
    ),
    "Gemma3DecoderLayer": LayerForm(norm="rms_offset", order="sandwich", mlp_norm="pre_feedforward_layernorm"),
    "VaultGemmaDecoderLayer": LayerForm(norm="rms_offset", mlp_norm="pre_feedforward_layernorm", softcap=True),
    # OLMo: norms after attention and MLP, and of all queries together
    "Olmo2DecoderLayer": LayerForm(norm="rms_wide", order="post", qk_norm="all"),
    "Olmo3DecoderLayer": LayerForm(norm="rms_wide", order="post", qk_norm="all"),
    # Cohere: attention and MLP side by side
    "CohereDecoderLayer": LayerForm(norm="layer", order="parallel", rope="interleaved"),
    "Cohere2DecoderLayer": LayerForm(norm="layer", order="parallel", rope="interleaved", rope_on="sliding"),
    # Experts: router and block are their own, experts by models/experts.py
    "MixtralDecoderLayer": LayerForm(window="config"),
    "Qwen2MoeDecoderLayer": LayerForm(),
    "Qwen3MoeDecoderLayer": LayerForm(),
    "Qwen3VLMoeTextDecoderLayer": LayerForm(),
    "Dots1DecoderLayer": LayerForm(),
    "GptOssDecoderLayer": LayerForm(norm="rms_wide", rope="half_table"),
    # Layers of attention between layers with a state
    "Qwen3NextDecoderLayer": LayerForm(norm="rms_offset", gate=True),
    "Qwen3_5DecoderLayer": LayerForm(norm="rms_offset", gate=True),
    "Qwen3_5MoeDecoderLayer": LayerForm(norm="rms_offset", gate=True),
}
"""Name of a layer class in `transformers.models` -> its form."""

_QWEN3_5 = StateForm(("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"))
KNOWN_MIXERS: dict[str, StateForm] = {
    "Qwen3NextGatedDeltaNet": StateForm(("in_proj_qkvz", "in_proj_ba"), by_key_head=True),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
}
"""Name of the class of a layer's `linear_attn` -> the form of the layer with a state."""

_ROBERTA = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
OWN_FORWARD: dict[str, str] = {
    **dict.fromkeys(_ROBERTA, "it counts positions by itself"),
    "doge": "it builds its own attention mask",
    "moshi": "it does not pass keyword arguments to its attention",
}
"""Model types that use the AttentionInterface but cannot compute on packed tokens, and why."""

INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
"""Two names of one kind of layer: of transformers from 5.18 on, and of earlier ones."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", *INDEXED_LAYERS}
"""Entries of `config.layer_types` that our attention function serves."""


_LINEAR = frozenset({"linear_attention"})
_HYBRID = frozenset({"hybrid"})
STATE_MODELS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid"), _LINEAR),
    **dict.fromkeys(("bamba", "granitemoehybrid", "jamba", "minimax", "recurrent_gemma"), _LINEAR),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _LINEAR),
    "nemotron_h": _LINEAR | {"mlp", "moe"},
    "falcon_h1": _HYBRID,
    **dict.fromkeys(("zamba", "zamba2"), _LINEAR | _HYBRID),
    "zaya": _HYBRID | {"hybrid_sliding"},
    **dict.fromkeys(("lfm2", "lfm2_moe"), frozenset({"conv"})),
}
"""Model types with layers that have a state, on packed tokens -> entries of `config.layer_types` other than `ATTENTION_LAYERS`."""


def install_decoder_layers(model: nn.Module) -> bool:
    """Replace the layers and the final norm of a transformers model; whether all of them are known (else nothing changes)."""
    decoder: Any = model if hasattr(model, "layers") else decoder_of(model)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return False
    if any(isinstance(layer, StreamLayer) for layer in decoder.layers):
        return True
    limit_kernels(model)
    found = [_our_layer(layer, decoder.config) for layer in decoder.layers]
    layers = [layer for layer in found if layer is not None]
    if len(layers) < len(decoder.layers):
        install_state_mixers(model)
        install_attention_variants(model)
        return False
    decoder.norm = FinalNorm(decoder.norm, layers[0].norm_kind)
    decoder.layers = nn.ModuleList(layers)
    return True


def _our_layer(layer: nn.Module, config: Any) -> StreamLayer | None:
    """The layer of ours that computes with the children of a transformers layer, if it is known."""
    form = KNOWN_LAYERS.get(type(layer).__name__)
    if form is None or not type(layer).__module__.startswith("transformers.models."):
        return None
    mixer = getattr(layer, "linear_attn", None)
    if mixer is None:
        return DecoderLayer(layer, form)
    state_form = KNOWN_MIXERS.get(type(mixer).__name__)
    return None if state_form is None else StateLayer(layer, state_form, config)


def why_own_forward(hf_config: PretrainedConfig) -> str | None:
    """Why a model cannot compute on packed tokens under our attention function; None if it can."""
    text = hf_config.get_text_config()
    if reason := OWN_FORWARD.get(hf_config.model_type, OWN_FORWARD.get(text.model_type)):
        return reason
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(
        type(text), None
    )
    if cls is None:
        return None  # remote code, or no causal LM: the check at load time decides
    states = STATE_MODELS.get(text.model_type)
    if cls._is_stateful and states is None:
        return "it has a recurrent state"
    if others := set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS - (states or frozenset()):
        return f"it has layers of {', '.join(sorted(others))}"
    if not cls._supports_attention_backend and states is None:
        return "it does not attend through transformers' AttentionInterface"
    return None


def has_states(hf_config: PretrainedConfig) -> bool:
    """Whether the model has layers with a state (recurrence, convolution), which run on packed tokens."""
    return hf_config.get_text_config().model_type in STATE_MODELS


def attention_implementation(hf_config: PretrainedConfig) -> str | dict[str, str]:
    """What to load the model with: our attention function, or transformers' eager attention for its own forward."""
    return of_language_model(hf_config, ATTENTION_NAME if why_own_forward(hf_config) is None else "eager")


def of_language_model(hf_config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """The setting of `attn_implementation` that leaves a vision tower with transformers' own choice."""
    text = hf_config.get_text_config()
    names = [name for name in hf_config.sub_configs if getattr(hf_config, name, None) is text]
    return dict.fromkeys(("", *names), attention) if names else attention


def computes_packed(model: PreTrainedModel) -> bool:
    """Whether the model attends through our function; otherwise it computes whole rows by its own forward."""
    text: Any = model.config.get_text_config()
    return bool(text._attn_implementation == ATTENTION_NAME)
