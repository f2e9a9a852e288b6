"""Lengths at which a model computes differently: windows, chunks, sparse attention, and ropes with a second set of frequencies.

A check of a few tokens sees none of them, and one of many tokens is expensive. `miniature` makes a small random model with the same
settings, in which all of them lie within a few tokens.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.models.rope import changes_with_length, fix_rope

WINDOWS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention", "block_size"),
    *("attention_chunk_size", "keep_window_size", "index_topk", "indexer_budget"),
)
"""Keys of a model's config that are a number of tokens."""
ORIGINAL = "original_max_position_embeddings"
SMALL_LENGTH = 5
VOCABULARY = 64
INNER = 32
_INNER_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim")


def switch_lengths(hf_config: PretrainedConfig) -> dict[str, int]:
    """Key of the config -> the longest sequence that is computed as a shorter one is."""
    text: Any = hf_config.get_text_config()
    found: dict[str, int] = {name: getattr(text, name) for name in WINDOWS if _is_length(getattr(text, name, None))}
    for rope in _changing_ropes(text):
        original: Any = (
            rope.get(ORIGINAL) or getattr(text, ORIGINAL, None) or getattr(text, "max_position_embeddings", None)
        )
        if _is_length(original):
            found[f"rope_parameters ({rope['rope_type']})"] = original
    return found


def miniature(model: PreTrainedModel, max_length: int) -> PreTrainedModel:
    """A random model of the same class, float32 on the CPU: two layers, or one of each kind, that switch at `SMALL_LENGTH` tokens.

    max_length: of its sequences. Raises whatever the model's code raises for such a config.
    """
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    _keep_layers(text)
    lengths = {name: SMALL_LENGTH for name in (*WINDOWS, ORIGINAL) if _is_length(getattr(text, name, None))}
    inner = {name: INNER for name in _INNER_SIZES if isinstance(getattr(text, name, None), int)}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, value in (lengths | inner | tokens).items():
        setattr(text, name, value)
    for rope in _changing_ropes(text):
        rope[ORIGINAL] = SMALL_LENGTH
    if any("dynamic" in rope["rope_type"] for rope in _changing_ropes(text)):
        text.max_position_embeddings = SMALL_LENGTH
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not those of GPUs, whose state is kept
        small: PreTrainedModel = type(model)(config)
        small = nn.Module.to(small, device="cpu", dtype=torch.float32).eval()
        for parameter in small.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    fix_rope(small, max_length)
    return small


def _keep_layers(text: Any) -> None:
    """Keep the first layer of each kind, at least two."""
    name = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if hasattr(text, name)), None)
    if name is None:
        return
    num_layers = getattr(text, name)
    lists = {key: value for key, value in vars(text).items() if isinstance(value, list) and len(value) == num_layers}
    kinds = list(zip(*lists.values())) if lists else [()] * num_layers
    chosen = sorted({kinds.index(kind) for kind in kinds} | set(range(min(2, num_layers))))
    setattr(text, name, len(chosen))
    for key, values in lists.items():
        setattr(text, key, [values[i] for i in chosen])


def _changing_ropes(text: Any) -> Iterator[Any]:
    """The rope settings, of each layer type if they differ, whose frequencies depend on the length."""
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):
        if isinstance(settings, dict) and changes_with_length(settings.get("rope_type")):
            yield settings


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
