"""The LoRA adapters of a model: their parameters, what they keep for the backward pass, and a base in 4 bits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.model import HFModelConfig
from lockstep.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Adapters:
    """parameters:    of all layers.
    layer_entries: kept per token and layer beyond the activations of the frozen layer.
    moved_entries: read or written per token and layer: each adapter reads its input and adds to the output of its linear layer.
    """

    parameters: int
    layer_entries: int
    moved_entries: int


FOUR_BIT_BYTES = 0.5 + (1 + 4 / 256) / 64
"""Per weight: 4 bits, an 8-bit scale for 64 of them and a float32 scale for 256 of those."""


@dataclass(frozen=True)
class FourBitBase:
    """Linear layers in 4 bits. parameters: of all layers; largest: of one linear layer, which is dequantised to compute."""

    parameters: int
    largest: int

    @property
    def bytes(self) -> float:
        return FOUR_BIT_BYTES * self.parameters


def four_bit_base(model: HFModelConfig, shape: ModelShape) -> FourBitBase | None:
    """None if the base is in the compute dtype. Experts stay in it: their weights are not linear layers in transformers."""
    if not model.load_in_4bit:
        return None
    largest = max(inputs * outputs for inputs, outputs in _linear_layers(shape).values())
    return FourBitBase(linear_parameters(shape), largest)


def linear_parameters(shape: ModelShape) -> int:
    """Weights of the decoder's linear layers."""
    linears = _linear_layers(shape).items()
    return sum(_num_layers(shape, name) * inputs * outputs for name, (inputs, outputs) in linears)


def adapters_of(model: HFModelConfig, shape: ModelShape) -> Adapters | None:
    """model: the config section; None if all parameters are trained.

    Experts have no adapters: their weights are not linear layers in transformers.
    """
    if not model.lora_rank:
        return None
    chosen = {
        name: sizes
        for name, sizes in _linear_layers(shape).items()
        if _matches(name, model.target_modules)
        and not (model.exclude_modules and _matches(name, model.exclude_modules))
    }
    return Adapters(
        parameters=model.lora_rank * sum(_num_layers(shape, name) * sum(sizes) for name, sizes in chosen.items()),
        layer_entries=model.lora_rank * len(chosen),
        moved_entries=sum(inputs + 2 * outputs for inputs, outputs in chosen.values()),
    )


def _linear_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Name within a decoder layer -> (inputs, outputs)."""
    width, queries, keys = shape.width, shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    found = {f"self_attn.{name}_proj": (width, size) for name, size in (("q", queries), ("k", keys), ("v", keys))}
    found["self_attn.o_proj"] = (queries, width)
    if shape.experts == 1:
        found |= {"mlp.gate_proj": (width, shape.inner), "mlp.up_proj": (width, shape.inner)}
        found["mlp.down_proj"] = (shape.inner, width)
    if shape.state is not None:  # transformers has some of the input projections in several layers
        found["linear_attn.in_proj"] = (width, shape.state.projected)
        found["linear_attn.out_proj"] = (shape.state.inner, width)
    return found


def _num_layers(shape: ModelShape, name: str) -> int:
    """Decoder layers that have a linear layer of this name."""
    counts = {"self_attn": shape.counts.attention, "mlp": shape.counts.mlp, "linear_attn": shape.counts.state}
    return counts[name.partition(".")[0]]


def _matches(name: str, modules: str | Sequence[str]) -> bool:
    """As in peft: a list holds ends of names, a string is all-linear or a regular expression for the whole name."""
    if modules == "all-linear":
        return True
    if isinstance(modules, str):
        return re.fullmatch(modules, f"model.layers.0.{name}") is not None
    return any(name == end or name.endswith(f".{end}") for end in modules)
