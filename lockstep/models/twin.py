"""A second module over the very same tensors: the rollout decodes with the trainer's parameters, without its hooks and modes.

The trainer's module may be sharded, in training mode and checkpointing its activations; its twin is a plain module in evaluation
mode. Nothing is copied: after `share` both hold the same tensors, so an optimizer step is seen by the next decoded token.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def make_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A module of the same architecture whose parameters hold no memory until `share`."""
    with torch.device("meta"):
        twin = type(model)._from_config(
            copy.deepcopy(model.config), attn_implementation=model.config._attn_implementation
        )
    for name, buffer in model.named_buffers():
        _set(twin, name, buffer)
    return twin.eval().requires_grad_(False)


def share(twin: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Let the twin use these tensors (the trainer's own) as its parameters."""
    seen = set()
    for name, tensor in weights:
        _set(twin, name, tensor)
        seen.add(name)
    if isinstance(twin, PreTrainedModel):
        twin.tie_weights()
    unset = [name for name, p in twin.named_parameters() if p.is_meta]
    if unset:
        raise RuntimeError(
            f"the trainer gave no tensor for {unset[:5]} (of {len(unset)}); given were {sorted(seen)[:5]}"
        )


def release(twin: nn.Module) -> None:
    """Drop the shared tensors, so that the trainer may free or move them."""
    for name, parameter in list(twin.named_parameters()):
        _set(twin, name, torch.empty_like(parameter, device="meta"))


def _set(root: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
