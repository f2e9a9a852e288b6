"""Gradient checkpointing of as many layers as memory asks for.

A layer that is checkpointed keeps its input alone and computes everything else again in the backward pass, to the same bits: so
which layers do it changes time and memory, never a result. On CUDA, layers keep their activations while they fit, unless the
run offloads to save memory.
"""

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lockstep.kernels.activation_memory import STREAM_BYTES, gathered_bytes, kept_layers
from lockstep.kernels.exact import same_mode_again
from lockstep.models.stream_layer import StreamLayer
from lockstep.models.token_models import TokenModel
from lockstep.utils.distributed import least_of_ranks


class LayerCheckpointing:
    """every_layer: checkpoint all layers, also if activations fit: for runs that offload to save memory."""

    def __init__(self, model: TokenModel, device: torch.device, dtype: torch.dtype, *, every_layer: bool) -> None:
        self._device = device
        self._itemsize = dtype.itemsize
        self._adapts = device.type == "cuda" and not every_layer
        options = {"use_reentrant": False, "context_fn": same_mode_again}
        model.transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True  # which transformers asks for; its children stay in evaluation mode
        self._layers = [module for module in model.modules() if isinstance(module, StreamLayer)]
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gathered = self._gathered_bytes(model) if any(isinstance(p, DTensor) for p in model.parameters()) else 0.0

    def plan(self, num_tokens: int) -> None:
        """Choose the layers to checkpoint in the next forward of `num_tokens` tokens."""
        if not self._adapts or not self._layers:
            return
        total = torch.cuda.get_device_properties(self._device).total_memory
        free = torch.cuda.mem_get_info(self._device)[0]
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free += cached - self._missing_gradients()
        sizes = {layer: layer.activation_bytes(num_tokens, self._itemsize) for layer in self._layers}
        known = {layer: size for layer, size in sizes.items() if size is not None}
        num_kept = 0
        if known:
            stream = num_tokens * self._layers[0].width * STREAM_BYTES
            free -= stream * (len(sizes) - len(known))
            num_kept = kept_layers(total, free, len(known), max(known.values()), stream, self._gathered)
        num_kept = least_of_ranks(num_kept)  # recomputation repeats the collectives of a layer
        kept = set(list(known)[:num_kept])
        for layer in self._layers:
            layer.gradient_checkpointing = layer not in kept

    @property
    def num_checkpointed(self) -> int:
        """Layers that compute their activations again, as last planned."""
        return sum(layer.gradient_checkpointing for layer in self._layers)

    def keep_nothing(self) -> bool:
        """Checkpoint every layer from now on; False if all of them are."""
        has_changed = self._adapts and not all(layer.gradient_checkpointing for layer in self._layers)
        self._adapts = False
        for layer in self._layers:
            layer.gradient_checkpointing = True
        return has_changed

    def _missing_gradients(self) -> int:
        """Bytes that the backward pass will allocate for gradients of this rank's shards."""
        missing = [p for p in self._trained if p.grad is None]
        sizes = [(p.to_local() if isinstance(p, DTensor) else p).numel() for p in missing]
        return sum(size * (p.grad_dtype or p.dtype).itemsize for size, p in zip(sizes, missing))

    def _gathered_bytes(self, model: TokenModel) -> float:
        """Bytes of gathered parameters and their gradients during the backward pass of a sharded model."""

        def sizes(parameters: Callable[[Module], Iterable[Parameter]]) -> tuple[int, int]:
            """Entries of the largest layer, and of all parameters outside of layers."""
            layers = [sum(p.numel() for p in parameters(layer)) for layer in self._layers]
            return max(layers, default=0), sum(p.numel() for p in parameters(model)) - sum(layers)

        trained = sizes(lambda module: (p for p in module.parameters() if p.requires_grad))
        return gathered_bytes(*sizes(Module.parameters), max(trained), self._itemsize)
