"""Attention of decode steps on CUDA."""

from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.engines.rollout.embedded.state_slots import DecodeStates
from lockstep.kernels.paged_decode import decode_attention, num_splits
from lockstep.models.attention import LayerOptions
from lockstep.models.state_rows import StateCore


@dataclass(frozen=True)
class CudaDecodeAttention:
    """The attention context of a decode step of T rows. Its buffers are updated in place, as CUDA graphs need.

    addresses:   (layers, 2) addresses of the cache's keys and values.
    tables:      (slots, width) blocks of the sequence in each decode slot.
    slot_ids:    (T,) decode slot of each row.
    positions:   (T,) position of each new token in its sequence.
    cache_slots: (T,) where each new token is cached, block * block_size + offset; -1 for nowhere.
    max_splits:  most splits per row and key head.
    states:      the rows of layers with a state; None if there are no such layers.
    """

    addresses: Tensor
    block_size: int
    tables: Tensor
    slot_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    max_splits: int
    states: DecodeStates | None = None

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        return decode_attention(
            query,
            key,
            value,
            self.addresses[layer.layer_idx],  # type: ignore[index]
            *(self.tables, self.slot_ids, self.positions, self.cache_slots),
            scale=options.scaling,
            window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=options.sinks,
            block_size=self.block_size,
            splits=num_splits(key.shape[1] * key.shape[2], key.shape[3], self.max_splits),
        )

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        assert self.states is not None
        return self.states.mix(layer.layer_idx, core, x)  # type: ignore[arg-type]
