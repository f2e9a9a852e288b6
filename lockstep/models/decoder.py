"""The decoder of a transformers model: what computes hidden states, without the head."""

from typing import Any

from transformers import PreTrainedModel


def decoder_of(model: Any) -> Any:
    """`model.get_decoder()`, also for causal LMs that transformers finds none or a wrong one in; a decoder is its own."""
    if not isinstance(model, PreTrainedModel):
        return model.get_decoder()
    found: Any = model.get_decoder()
    if isinstance(found, PreTrainedModel) and (found is not model or model.get_output_embeddings() is None):
        return found
    return getattr(model, "model", found)
