"""Compile the kernels of the engine in background threads, by launching each once on the padding slot.

Triton's compilers run outside Python, so several compile at once while the host allocates the cache and runs the first prefill.
Warm-up errors are ignored; the real launch raises them.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.cuda.decode_slots import DecodeSlots
from lockstep.engines.rollout.embedded.model_runner import ModelRunner
from lockstep.engines.rollout.embedded.paged_attention import LayerShape
from lockstep.kernels import sampling
from lockstep.kernels.paged_decode import decode_attention, write_to_cache
from lockstep.utils.device import background


class KernelWarmup:
    """The slots may be used after `wait`. max_splits: most attention splits of a row."""

    def __init__(self, runner: ModelRunner, slots: DecodeSlots, max_splits: int) -> None:
        self.runner, self.slots = runner, slots
        text_config = runner.model.config.get_text_config()
        self._num_heads: int = text_config.num_attention_heads
        self._slot_ids = torch.full((1,), slots.padding_slot, dtype=torch.int32, device=slots.device)
        self._logits = torch.zeros(1, text_config.vocab_size, device=slots.device)
        self._buffers = sampling.tile_buffers(self._logits)
        self._pool = background(slots.device)
        self._futures: list[Future[None]] = []
        self._start(self._sum_tiles, self._pick_token, self._begin_step)  # compiled while `layers` runs the model
        self._cache_addresses = runner.cache_addresses[0]
        for shape in set(runner.layers().values()):
            splits = {1, min(2, max_splits)}
            self._start(partial(self._write, shape), *(partial(self._attend, shape, n) for n in splits))
        self._pool.shutdown(wait=False)

    def wait(self) -> None:
        wait(self._futures)

    def _start(self, *launches: Callable[[], None]) -> None:
        self._futures += [self._pool.submit(torch.no_grad()(launch)) for launch in launches]

    def _sum_tiles(self) -> None:
        sampling.sum_tiles(self._logits, self.slots.slot_options, self._slot_ids, None, *self._buffers)

    def _pick_token(self) -> None:
        slots = self.slots
        state, outputs = (slots.slot_state, slots.slot_options), (slots.step, slots.sampled, slots.log_probs)
        sampling.pick_token(self._logits, *state, self._slot_ids, None, *self._buffers, *outputs)

    def _begin_step(self) -> None:
        slots = self.slots
        inputs = slots.tokens[:, :1], slots.positions[:, :1], slots.cache_slots[:1], torch.zeros_like(slots.step)
        ring, block_size = len(slots.sampled), self.runner.block_size
        sampling.begin_step(slots.slot_state, slots.tables, self._slot_ids, *inputs, ring=ring, block_size=block_size)

    def _write(self, shape: LayerShape) -> None:
        cache = self._zeros(shape, shape.num_heads * self.runner.block_size, shape.value_dim)
        cache_slots = torch.zeros(1, dtype=torch.int64, device=self.slots.device)
        new = self._zeros(shape, shape.num_heads, shape.value_dim)
        write_to_cache(new, cache, cache_slots, self.runner.block_size)

    def _attend(self, shape: LayerShape, splits: int) -> None:
        """A row at position 0 that is not written to the cache: it attends to itself only."""
        position = torch.zeros(1, dtype=torch.int64, device=self.slots.device)
        sinks = torch.zeros(self._num_heads, dtype=shape.dtype, device=self.slots.device) if shape.has_sinks else None
        decode_attention(
            self._zeros(shape, self._num_heads, shape.key_dim),
            self._zeros(shape, shape.num_heads, shape.key_dim),
            self._zeros(shape, shape.num_heads, shape.value_dim),
            self._cache_addresses,
            self.slots.tables,
            self._slot_ids,
            positions=position,
            cache_slots=position - 1,
            scale=1.0,
            window=shape.sliding_window,
            block_size=self.runner.block_size,
            splits=splits,
            softcap=shape.softcap,
            sinks=sinks,
        )

    def _zeros(self, shape: LayerShape, num_heads: int, dim: int) -> Tensor:
        return torch.zeros(1, num_heads, 1, dim, dtype=shape.dtype, device=self.slots.device)
