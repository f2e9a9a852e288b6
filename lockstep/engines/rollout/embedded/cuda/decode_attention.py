"""Attention of decode steps on CUDA."""

from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.engines.rollout.embedded.state_slots import DecodeStates
from lockstep.kernels.draft_decode import draft_attention
from lockstep.kernels.exact import is_exact
from lockstep.kernels.exact_attention import attend
from lockstep.kernels.key_scores import key_scores
from lockstep.kernels.latent_decode import head_blocks, latent_attention
from lockstep.kernels.paged_decode import decode_attention, num_splits, write_to_cache
from lockstep.models.latent_attention import LatentKeys
from lockstep.models.layer_options import LayerOptions
from lockstep.models.state_rows import StateCore


@dataclass(frozen=True)
class CudaDecodeAttention:
    """The attention context of a decode step of T rows. Its buffers are updated in place, as CUDA graphs need.

    addresses:    (layers, 2) addresses of the cache's keys and values.
    tables:       (slots, width) blocks of the sequence in each decode slot.
    slot_ids:     (T,) decode slot of each row.
    positions:    (T,) position of each new token in its sequence.
    cache_slots:  (T,) where each new token is cached, block * block_size + offset; -1 for nowhere.
    max_splits:   most splits per row or group of rows, and key head.
    fp8:          the cache is in 8 bits.
    states:       the rows of layers with a state; None if there are no such layers.
    group_starts: (P + 1,) groups of rows as in `draft_attention`, if sequences have several rows; else None. Rows see the new
                  tokens of other rows then, so all are written before any are read.
    """

    addresses: Tensor
    block_size: int
    tables: Tensor
    slot_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    max_splits: int
    fp8: bool
    states: DecodeStates | None = None
    group_starts: Tensor | None = None

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        if is_exact():
            return self._attend_exactly(layer, query, key, value, options)
        if self.group_starts is not None:
            return self._attend_in_groups(layer, query, key, value, options, self.group_starts)
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
            fp8=self.fp8,
        )

    def _attend_in_groups(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions, group_starts: Tensor
    ) -> Tensor:
        addresses = self.addresses[layer.layer_idx]  # type: ignore[index]
        self._write(addresses, key, value)
        return draft_attention(
            query,
            addresses,
            *(self.tables, self.slot_ids, self.positions, group_starts),
            key_heads=key.shape[1],
            value_dim=value.shape[-1],
            scale=options.scaling,
            window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=options.sinks,
            block_size=self.block_size,
            max_splits=self.max_splits,
            fp8=self.fp8,
        )

    def attend_latent(self, layer: nn.Module, query: Tensor, keys: LatentKeys, options: LayerOptions) -> Tensor:
        addresses = self.addresses[layer.layer_idx]  # type: ignore[index]
        key, value = keys.join(options.index)
        writes_before = self.group_starts is not None or options.index is not None
        if writes_before:
            self._write(addresses, key, value)
        mixed = latent_attention(
            keys.absorb(query),
            key,
            addresses,
            *(self.tables, self.slot_ids, self.positions),
            None if writes_before else self.cache_slots,
            latent_dim=keys.latent.shape[-1],
            scale=options.scaling,
            window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=options.sinks,
            block_size=self.block_size,
            splits=num_splits(key.shape[2] * head_blocks(query.shape[1], key.dtype), key.shape[3], self.max_splits),
            picked=self._pick(key, addresses, options),
        )
        return keys.project(mixed)

    def _pick(self, key: Tensor, addresses: Tensor, options: LayerOptions) -> Tensor | None:
        """(T, topk) positions that each row attends to if it sees more; None if all rows attend to all that they see."""
        index = options.index
        if index is None or index.topk >= self.tables.shape[1] * self.block_size:
            return None
        scores = key_scores(
            index.queries,
            index.weights,
            key,
            addresses,
            *(self.tables, self.slot_ids, self.positions),
            window=options.sliding_window,
            chunk=options.chunk,
            block_size=self.block_size,
        )
        return scores.topk(index.topk, -1, sorted=False).indices

    def _attend_exactly(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions
    ) -> Tensor:
        addresses = self.addresses[layer.layer_idx]  # type: ignore[index]
        self._write(addresses, key, value)
        out = attend(
            query[0].transpose(0, 1)[:, :, None],
            addresses,
            self.tables,
            self.slot_ids,
            self.positions[:, None],
            key_heads=key.shape[1],
            value_dim=value.shape[-1],
            block_size=self.block_size,
            scale=options.scaling,
            window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        return out[:, 0][None]

    def _write(self, addresses: Tensor, key: Tensor, value: Tensor) -> None:
        for new, address in ((key, addresses[:1]), (value, addresses[1:])):
            write_to_cache(new, None, self.cache_slots, self.block_size, address=address, fp8=self.fp8)

    def mix(self, layer: nn.Module, core: StateCore, x: Tensor) -> Tensor:
        assert self.states is not None
        return self.states.mix(layer.layer_idx, core, x)  # type: ignore[arg-type]
