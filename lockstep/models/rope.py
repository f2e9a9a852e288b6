"""Rotary frequencies that depend on nothing but the model and the run's longest sequence.

transformers chooses the frequencies of `dynamic` and `longrope` by the longest position of each call: the values of a row would
change with the longest row of its batch, and cached keys would not match later tokens. As in vLLM, they are fixed once, for the
run's longest sequence.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_rope(model: nn.Module, max_length: int | None) -> None:
    """Fix the frequencies for sequences up to `max_length`; None for the model's original context."""
    for rotary in _changing(model):
        original = rotary.config.rope_parameters.get("original_max_position_embeddings") or rotary.original_max_seq_len
        rotary.max_length = max(max_length or 0, original)
        device = rotary.inv_freq.device
        frequencies = ROPE_INIT_FUNCTIONS[rotary.rope_type](rotary.config, device, seq_len=max_length or original)
        rotary.inv_freq, rotary.attention_scaling = frequencies
        rotary.rope_type = "fixed"
        if "long_mscale" in rotary.config.rope_parameters:
            rotary.config = _of_one_length(rotary.config, is_long=rotary.max_length > original)


def copy_rope(source: nn.Module, target: nn.Module) -> None:
    """Fix the target's frequencies as the source's are; their buffers are shared otherwise."""
    for name, module in source.named_modules():
        if getattr(module, "rope_type", None) == "fixed":
            rotary: Any = target.get_submodule(name)
            rotary.rope_type = "fixed"
            rotary.max_length = module.max_length
            rotary.attention_scaling = module.attention_scaling
            rotary.config = module.config


def rope_limit(model: nn.Module) -> int | None:
    """The longest sequence for which the frequencies were fixed; None if there is no such limit."""
    limits: list[Any] = [m.max_length for m in model.modules() if getattr(m, "rope_type", None) == "fixed"]
    return min(limits, default=None)


def changes_with_length(rope_type: object) -> bool:
    """Whether transformers chooses the frequencies of this type by the length of a call."""
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def _of_one_length(config: Any, *, is_long: bool) -> Any:
    """A config for PhiMoE's rotary module, whose forward takes frequencies and scale from it: the same for all lengths."""
    config = copy.deepcopy(config)
    rope = config.rope_parameters
    kind = "long" if is_long else "short"
    rope |= {"short_factor": rope[f"{kind}_factor"], "long_factor": rope[f"{kind}_factor"]}
    rope |= {"short_mscale": rope[f"{kind}_mscale"], "long_mscale": rope[f"{kind}_mscale"]}
    return config


def _changing(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(map(changes_with_length, kind.values())):
            raise ValueError(f"{type(module).__name__}: dynamic rope per layer type is not supported")
        if changes_with_length(kind):
            yield module
