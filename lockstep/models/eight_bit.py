"""8-bit weights of a rollout: copies of the decoder layers' linear weights, made again from the trainer's at each rollout.

    trainer's weights ─► quantize, once per `serving` ─► 8-bit copies, always in the same memory ─► products of prefill and decoding

The layers are the trainer's (`models/decoder_layer.py`): their products take the copy while they are served (`kernels/linear.py`).
Embeddings, norms, the vocabulary head and LoRA adapters keep their precision.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.kernels.fp8 import PRODUCT_DTYPE, Fp8Rows, empty_rows, has_fp8_products, joined, quantize
from lockstep.kernels.linear import linear_and_adapter, set_fp8_weight
from lockstep.models.decoder import decoder_of
from lockstep.models.decoder_layer import DecoderLayer
from lockstep.models.four_bit import has_4bit_linears
from lockstep.utils.distributed import current_rank

logger = logging.getLogger(__name__)
_KEY = "actor_rollout_ref.rollout.quantization"


class Fp8Weights:
    """Of `model`, whose weights may have no memory yet. ValueError if its layers cannot be served so."""

    def __init__(self, model: nn.Module) -> None:
        if reason := why_no_fp8(model):
            raise ValueError(f"{_KEY}=fp8 cannot serve {type(model).__name__}: {reason}; set null")
        self._products = [_linears(modules) for layer in _layers(model) for modules in layer.products()]
        self._copies: list[list[Fp8Rows]] = []
        self._speed_is_known = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Inside, products without gradients compute with copies of the present weights, which must not change."""
        if self._copies and self._copies[0][0].values.device != self._products[0][0].weight.device:
            self.free()
        if not self._speed_is_known:
            _warn_if_slow(self._products[0][0].weight)
            self._speed_is_known = True
        if not self._copies:
            self._copies = [_allocate(linears) for linears in self._products]
        self._refresh()
        try:
            for linears, copies in zip(self._products, self._copies):
                for linear, copy in zip(linears, copies):
                    set_fp8_weight(linear, copy)
            yield
        finally:
            for linear in (linear for linears in self._products for linear in linears):
                set_fp8_weight(linear, None)

    @torch.no_grad()
    def _refresh(self) -> None:
        for linears, copies in zip(self._products, self._copies):
            for linear, copy in zip(linears, copies):
                quantize(linear.weight, copy)

    def free(self) -> None:
        """Release the copies until the next `serving`, which may place them elsewhere."""
        self._copies = []

    def addresses(self) -> tuple[int, ...]:
        return tuple(joined(copies).values.data_ptr() for copies in self._copies)

    @property
    def is_allocated(self) -> bool:
        return bool(self._copies)

    @property
    def num_bytes(self) -> int:
        """Memory of the copies, once they are made."""
        sizes = (linear.weight.shape for linears in self._products for linear in linears)
        return sum(rows * width + 4 * rows for rows, width in sizes)


def why_no_fp8(model: nn.Module) -> str | None:
    """None if all its products can be in 8 bits."""
    layers = list(getattr(decoder_of(model), "layers", ()))
    if others := [layer for layer in layers if not isinstance(layer, DecoderLayer)]:
        return f"its layers ({type(others[0]).__name__}) are not computed by lockstep's decoder layer"
    if not layers:
        return "it has no layers of lockstep's"
    if any(layer.activation is None for layer in layers):
        return "it has experts, or an MLP without a gate, which are not computed in 8 bits"
    if any(layer.tensor_group is not None for layer in layers):
        return "several ranks hold it together"
    if has_4bit_linears(model):
        return "its base is in 4 bits already"
    if any(linear_and_adapter(m) is None for layer in layers for modules in layer.products() for m in modules):
        return "a linear layer of it has its own forward"
    return None


def _warn_if_slow(weight: torch.Tensor) -> None:
    """On a GPU. On a CPU nobody quantises for speed."""
    if weight.device.type != "cuda" or current_rank() > 0:
        return
    if not has_fp8_products(weight.device):
        reason, remedy = "this GPU has no products in 8 bits", ""
    elif weight.dtype != PRODUCT_DTYPE:
        name = str(weight.dtype).removeprefix("torch.")
        reason, remedy = f"the model is in {name}", ", or actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"
    else:
        return
    logger.warning(
        "%s=fp8 makes this rollout slower: %s, so that products of 8-bit weights are computed in float32; set %s=null%s",
        *(_KEY, reason, _KEY, remedy),
    )


def _layers(model: nn.Module) -> Sequence[DecoderLayer]:
    decoder: Any = decoder_of(model)
    return list(decoder.layers)


def _linears(modules: Sequence[nn.Module]) -> list[nn.Linear]:
    found = [linear_and_adapter(module) for module in modules]
    return [pair[0] for pair in found if pair is not None]


def _allocate(linears: Sequence[nn.Linear]) -> list[Fp8Rows]:
    """Memory of a product's weights, adjacent in it."""
    sizes = [len(linear.weight) for linear in linears]
    joint = empty_rows(sum(sizes), linears[0].weight.shape[1], linears[0].weight.device)
    return [Fp8Rows(*pair) for pair in zip(joint.values.split(sizes), joint.scales.split(sizes))]
