"""Which transformers layers `models/decoder_layer.py` replaces, and how every other model computes.

    layer class in KNOWN_LAYERS ─► our decoder layer, on packed tokens
    attention through transformers' AttentionInterface ─► transformers' own layers under our attention function, on packed tokens
    anything else (recurrent state, own attention or masks) ─► its own forward, one row at a time

Whatever is chosen is compared with transformers' eager forward when an engine loads the model (`models/model_check.py`).
"""

from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.decoder_layer import DecoderLayer, FinalNorm, LayerForm

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
    "Dots1DecoderLayer": LayerForm(),
    "GptOssDecoderLayer": LayerForm(norm="rms_wide", rope="half_table"),
}
"""Name of a layer class in `transformers.models` -> its form."""

_HEAD = "its head is more than one linear layer"
_KWARGS = "it does not pass keyword arguments to its attention"
_DECODER = "transformers names no decoder in it"
OWN_FORWARD: dict[str, str] = {
    **dict.fromkeys(("doge", "phimoe"), "it builds its own attention mask"),
    **dict.fromkeys(
        ("bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm"), _HEAD
    ),
    **dict.fromkeys(("hyperclovax", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"), _HEAD),
    **dict.fromkeys(("moshi", "nemotron"), _KWARGS),
    **dict.fromkeys(("mllama", "modernbert-decoder"), _DECODER),
}
"""Model types that use the AttentionInterface but cannot compute on packed tokens, and why."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Entries of `config.layer_types` that our attention function serves."""


def install_decoder_layers(model: nn.Module) -> bool:
    """Replace the layers and the final norm of a transformers model; whether all of them are known (else nothing changes)."""
    decoder: Any = model if hasattr(model, "layers") else model.get_decoder()  # type: ignore[operator]
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return False
    if any(isinstance(layer, DecoderLayer) for layer in decoder.layers):
        return True
    forms = [_form_of(layer) for layer in decoder.layers]
    if any(form is None for form in forms):
        return False
    decoder.norm = FinalNorm(decoder.norm, forms[0].norm)  # type: ignore[union-attr]
    decoder.layers = nn.ModuleList(DecoderLayer(layer, form) for layer, form in zip(decoder.layers, forms) if form)
    return True


def _form_of(layer: nn.Module) -> LayerForm | None:
    if not type(layer).__module__.startswith("transformers.models."):
        return None
    return KNOWN_LAYERS.get(type(layer).__name__)


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
    if cls._is_stateful:
        return "it has a recurrent state"
    if others := set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS:
        return f"it has layers of {', '.join(sorted(others))}"
    if not cls._supports_attention_backend:
        return "it does not attend through transformers' AttentionInterface"
    return None


def attention_implementation(hf_config: PretrainedConfig) -> str:
    """What to load the model with: our attention function, or transformers' eager attention for its own forward."""
    return ATTENTION_NAME if why_own_forward(hf_config) is None else "eager"


def computes_packed(model: PreTrainedModel) -> bool:
    """Whether the model attends through our function; otherwise it computes one row at a time."""
    text: Any = model.config.get_text_config()
    return bool(text._attn_implementation == ATTENTION_NAME)
