"""A second module over the very same tensors: the rollout decodes with the trainer's parameters, without its hooks and modes.

The trainer's module may be sharded, in training mode and checkpointing its activations; its twin is a plain module in evaluation
mode. Nothing is copied: after `share` both hold the same tensors, so an optimizer step is seen by the next `generate`.
"""

import copy
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def make_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A module of the same architecture whose parameters hold no memory until `share`."""
    with torch.device("meta"):
        twin = type(model)._from_config(
            copy.deepcopy(model.config), attn_implementation=model.config._attn_implementation
        )
    return twin.eval().requires_grad_(False)


def share(twin: nn.Module, model: nn.Module) -> None:
    """Let the twin use the model's own tensors as its parameters and buffers."""
    for name, tensor in chain(model.named_parameters(remove_duplicate=False), model.named_buffers()):
        _set(twin, name, tensor)
    missing = [name for name, tensor in chain(twin.named_parameters(), twin.named_buffers()) if tensor.is_meta]
    if missing:
        raise RuntimeError(f"the trainer's model has no tensor for {missing[:5]} (of {len(missing)})")


def release(twin: nn.Module) -> None:
    """Drop the shared parameters, so that the trainer may free or move them."""
    for name, parameter in list(twin.named_parameters(remove_duplicate=False)):
        _set(twin, name, torch.empty_like(parameter, device="meta"))


def _set(root: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
