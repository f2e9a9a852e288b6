"""Which models the embedded engine can serve. Whatever it would compute wrongly is refused, with the way out."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.paged_attention import LayerShape


def refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"the embedded rollout cannot serve {type(model).__name__}: {reason}; "
        "use actor_rollout_ref.rollout.name=hf for this model, or vllm where that engine is installed"
    )


def check_config(model: nn.Module) -> None:
    """What the config tells before anything runs."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise refusal(model, "it is no transformers causal LM")
    text: Any = config.get_text_config()
    if config.is_encoder_decoder:
        raise refusal(model, "it is an encoder-decoder")
    if text._attn_implementation != ATTENTION_NAME:
        raise refusal(
            model, f"it was loaded with attn_implementation={text._attn_implementation!r} instead of {ATTENTION_NAME!r}"
        )
    if others := set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        raise refusal(model, f"it has layers of {', '.join(sorted(others))}")


def check_layers(model: Any, layers: Mapping[int, LayerShape]) -> None:
    """Every decoder layer must have attended: one that did not keeps a state that the KV cache does not hold."""
    text = model.config.get_text_config()
    if len(layers) != text.num_hidden_layers:
        raise refusal(
            model, f"only {len(layers)} of its {text.num_hidden_layers} layers are attention over keys and values"
        )
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind == "sliding_attention" and layers[index].sliding_window is None:
            raise refusal(model, f"layer {index} does not say its sliding window")
