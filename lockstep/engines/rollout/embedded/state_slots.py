"""The states of running sequences (recurrence, convolution): one slot per sequence in every layer that has a state.

    prefill:  first tokens of a sequence begin without a state ┐
              later chunks begin with that of their slot       ├─► core of the layer ─► state written to the slot
    decode:   one token per row, with the state of its slot    ┘

So what a slot holds from an earlier sequence, or from before a preemption, is never read. Which sequence has which slot is up to
the block manager.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from lockstep.models.state_rows import InPlaceCore, PackedCore, RowBounds, RowStates, StateCore, StateName
from lockstep.utils.device import to_device


@dataclass(frozen=True)
class StateShape:
    """One state tensor of a layer, per sequence."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


LayerStates = Mapping[int, Mapping[StateName, StateShape]]
"""State tensors of each layer with a state, by `layer_idx`."""


def bytes_per_slot(layers: LayerStates) -> int:
    return sum(shape.num_bytes for layer in layers.values() for shape in layer.values())


class StateSlots:
    """
    num_slots: slots of sequences. One more, the last, is for rows that belong to no sequence. What it holds cannot matter: no
               layer computes a row from another one, and nothing reads what these rows compute.
    tensors:   (num_slots + 1, …) by `layer_idx` and name.
    """

    def __init__(self, layers: LayerStates, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self.tensors: dict[int, dict[StateName, Tensor]] = {
            index: {
                name: torch.zeros(num_slots + 1, *shape.sizes, dtype=shape.dtype, device=device)
                for name, shape in layer.items()
            }
            for index, layer in layers.items()
        }

    @property
    def scratch(self) -> int:
        """The slot of rows that belong to no sequence."""
        return self.num_slots

    def grow(self, num_slots: int) -> None:
        """Add slots until there are `num_slots`; existing ones keep their content."""
        if num_slots <= self.num_slots:
            return
        for layer in self.tensors.values():
            for name, tensor in layer.items():
                missing = num_slots + 1 - len(tensor)  # less after a growth that ran out of memory
                if missing > 0:
                    layer[name] = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        self.num_slots = num_slots

    def read(self, layer_idx: int, slots: Tensor) -> RowStates:
        """A copy of the states in these slots (N,)."""
        return RowStates({name: tensor.index_select(0, slots) for name, tensor in self.tensors[layer_idx].items()})

    def write(self, layer_idx: int, slots: Tensor, states: RowStates) -> None:
        """Store the states of N rows in these slots (N,)."""
        tensors = self.tensors[layer_idx]
        assert tensors.keys() == states.tensors.keys(), f"layer {layer_idx} has states {set(states.tensors)}"
        for name, tensor in tensors.items():
            tensor.index_copy_(0, slots, states.tensors[name].to(tensor.dtype))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole slots in all layers: (source, target) pairs."""
        if not copies:
            return
        source, target = to_device(torch.tensor(copies), self.device).T
        for layer_idx in self.tensors:
            self.write(layer_idx, target, self.read(layer_idx, source))


@dataclass(frozen=True)
class RowGroup:
    """Rows of equal length in a prefill step, so that none is padded: padding would change the state.

    first:    index of their first token in the step; their tokens are contiguous.
    length:   tokens per row.
    slots:    (N,) state slots of the rows.
    is_fresh: whether these are the first tokens of their sequences.
    """

    first: int
    length: int
    slots: Tensor
    is_fresh: bool


@dataclass(frozen=True)
class _Part:
    """Rows that are computed in one call without padding."""

    is_fresh: bool
    slots: Tensor
    bounds: RowBounds


class PrefillStates:
    """Layers with a state in a prefill step. groups: all rows of the step, in the order of their tokens."""

    def __init__(self, store: StateSlots, groups: Sequence[RowGroup]) -> None:
        self.store = store
        self.groups = groups

    def mix(self, layer_idx: int, core: StateCore, x: Tensor) -> Tensor:
        """x (1, T, C) -> (1, T, C')."""
        if isinstance(core, PackedCore):
            return self._mix_packed(layer_idx, core, x)
        outputs = []
        for group in self.groups:
            num_rows = len(group.slots)
            rows = x[0, group.first : group.first + num_rows * group.length].unflatten(0, (num_rows, group.length))
            states = RowStates() if group.is_fresh else self.store.read(layer_idx, group.slots)
            outputs.append(core(rows, states).flatten(0, 1))
            self.store.write(layer_idx, group.slots, states)
        return torch.cat(outputs)[None]

    def _mix_packed(self, layer_idx: int, core: PackedCore, x: Tensor) -> Tensor:
        """Later chunks in one call, first tokens in another."""
        outputs = []
        for part, tokens in zip(self._parts, x.split([part.bounds.num_tokens for part in self._parts], 1)):
            states = RowStates() if part.is_fresh else self.store.read(layer_idx, part.slots)
            outputs.append(core.packed(tokens, part.bounds, states))
            self.store.write(layer_idx, part.slots, states)
        return torch.cat(outputs, 1)

    @cached_property
    def _parts(self) -> list[_Part]:
        parts = []
        for is_fresh, group in groupby(self.groups, key=lambda group: group.is_fresh):
            groups = list(group)
            bounds = np.array([0, *accumulate(length for g in groups for length in [g.length] * len(g.slots))])
            slots = torch.cat([g.slots for g in groups])
            parts.append(_Part(is_fresh, slots, RowBounds(bounds, self.store.device)))
        return parts


class DecodeStates:
    """Layers with a state in a decode step of one token per row, for CUDA graphs: shapes are fixed, nothing waits for the device.

    slots:     (T,) state slot of each row.
    is_active: (T,) False for rows that have stopped or pad the batch. They use the scratch slot: their own may be another
               sequence's by now.
    """

    def __init__(self, store: StateSlots, slots: Tensor, is_active: Tensor) -> None:
        self.store = store
        self.slots = slots.masked_fill(~is_active, store.scratch)

    def mix(self, layer_idx: int, core: StateCore, x: Tensor) -> Tensor:
        """x (1, T, C) -> (1, T, C')."""
        if isinstance(core, InPlaceCore):
            return core.step_in_place(x.transpose(0, 1), self.store.tensors[layer_idx], self.slots).transpose(0, 1)
        states = self.store.read(layer_idx, self.slots)
        out = core(x.transpose(0, 1), states).transpose(0, 1)
        self.store.write(layer_idx, self.slots, states)
        return out
