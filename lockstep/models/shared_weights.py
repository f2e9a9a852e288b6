"""The rollout's module, which decodes with the trainer's weights.

    one process:  `share_weights`: the rollout's parameters are the trainer's tensors; an optimizer step is seen by the next request
    sharded:      `copy_gathered`: whole parameters are gathered layer by layer into the rollout's own memory, which stays where it
                  is, with q/k/v and gate/up adjacent: captured CUDA graphs remain valid and decode as fast as on one GPU;
                  of a module that several ranks hold together (`models/split_weights.py`) each keeps its share

The trainer's module may be sharded, hooked and checkpointing its activations; the rollout's is a plain one in evaluation mode.
"""

import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.models.four_bit import has_4bit_linears, is_4bit, use_4bit_linears
from lockstep.models.known_models import install_decoder_layers, of_language_model
from lockstep.models.lora import copy_adapters
from lockstep.models.packed_weights import pack_weights
from lockstep.models.rope import copy_rope
from lockstep.models.split_weights import split_of
from lockstep.models.video_positions import fix_video_positions
from lockstep.utils.tensor_places import named


def rollout_module(model: PreTrainedModel) -> PreTrainedModel:
    """A module of the same architecture whose parameters hold no memory yet."""
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    with torch.device("meta"):
        module = type(model)._from_config(
            config, attn_implementation=of_language_model(config, text._attn_implementation)
        )
    install_decoder_layers(module)
    copy_rope(model, module)
    fix_video_positions(module)
    if has_4bit_linears(model):
        use_4bit_linears(module, model.dtype)
    copy_adapters(model, module)
    return module.eval().requires_grad_(False)


_EMPTY = "_lockstep_left_empty"


def share_weights(module: nn.Module, model: nn.Module) -> None:
    """Let the rollout's module use the model's own tensors as its parameters and buffers."""
    for name, tensor in shared_tensors(model):
        _set(module, name, tensor)
    _check_complete(module)


def shared_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What `share_weights` shares, by name."""
    return chain(named(model, "all parameters"), named(model, "buffers"))


def copy_gathered(module: nn.Module, weights: Iterable[tuple[str, Tensor]], model: nn.Module) -> None:
    """Copy whole parameters into the rollout's own memory, which is allocated at the first call.

    Buffers and weights in 4 bits are shared.

    weights: every parameter once by its name in `model`, later only those that change; each tensor is valid until the next is
             asked for.
    model:   tells which names are one tensor.
    """
    if getattr(module, _EMPTY, False):
        for _ in weights:
            pass
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter.is_meta:
                _set(module, name, torch.empty(0))  # not meta: like the other ranks' modules, it has been filled
        return
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    names = {group[0]: group for group in groups.values()}
    fresh = False
    split = split_of(module)
    for name, tensor in weights:
        if is_4bit(tensor):  # never changes, and is not sharded
            _set(module, name, tensor)
            continue
        if split is not None:
            tensor = split.take(name, tensor)
        own = module.get_parameter(name)
        if own.is_meta:
            fresh = True
            own = nn.Parameter(torch.empty_like(tensor, memory_format=torch.contiguous_format), False)
            for alias in names[name]:
                _set(module, alias, own)
        own.data.copy_(tensor)
    if fresh:
        for name, tensor in model.named_buffers():
            _set(module, name, tensor)
        pack_weights(module)
    _check_complete(module)


def leave_empty(module: nn.Module) -> None:
    """`copy_gathered` takes part in gathering the weights, but keeps none in this module: its rank does not generate."""
    setattr(module, _EMPTY, True)


def release_weights(module: nn.Module) -> None:
    """Drop the parameters, so that the trainer can free or move them."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        _set(module, name, torch.empty_like(parameter, device="meta"))


def _check_complete(module: nn.Module) -> None:
    missing = [name for name, tensor in chain(module.named_parameters(), module.named_buffers()) if tensor.is_meta]
    if missing:
        raise RuntimeError(f"the trainer's model has no tensor for {missing[:5]} (of {len(missing)})")


def _set(root: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
