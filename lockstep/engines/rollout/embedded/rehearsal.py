"""The kernels of prompts and of decode steps, launched once for nothing, so that Triton compiles them side by side.

Its compilers run outside of Python, and meanwhile the caller looks at the model. What differs in use is compiled there, and what
goes wrong here goes wrong there, where it can be told better.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from itertools import product

import torch
from torch import Tensor

from lockstep.engines.rollout.embedded.runner import ModelRunner
from lockstep.engines.rollout.embedded.seats import Seats
from lockstep.kernels import sampling
from lockstep.kernels.paged_decode import decode_attention, write_to_cache
from lockstep.kernels.rotary import rotary
from lockstep.models.paged_attention import LayerShape
from lockstep.utils.device import background


class Rehearsal:
    """What the first token waits for first, then steps. The seats may be used when what was begun has ended.

    max_splits: most stretches of one row's cache.
    """

    def __init__(self, runner: ModelRunner, seats: Seats, max_splits: int) -> None:
        self.runner, self.seats, self.max_splits = runner, seats, max_splits
        self._num_heads = getattr(runner.model.config.get_text_config(), "num_attention_heads", 0)
        self._shapes = set(runner.layers().values()) if self._num_heads else set()
        self._row = torch.full((1,), seats.spare, dtype=torch.int32, device=seats.device)
        self._logits = torch.zeros(1, runner.model.config.get_text_config().vocab_size, device=seats.device)
        self._sums = sampling.scratch(self._logits)
        self._first = self._begin(*self._for_each_shape(self._rotate, self._write), self._sum_stretches, self._pick)
        self._steps: list[Future[None]] | None = None

    def end_first(self) -> None:
        wait(self._first)
        if self._steps is None:
            self._steps = self._begin(self._begin_step, *self._ways_to_attend())

    def end(self) -> None:
        self.end_first()
        wait(self._steps or ())

    def _begin(self, *plays: Callable[[], None]) -> list[Future[None]]:
        pool = background(self.seats.device)
        futures = [pool.submit(torch.no_grad()(play)) for play in plays]
        pool.shutdown(wait=False)
        return futures

    def _sum_stretches(self) -> None:
        sampling.sum_stretches(self._logits, self.seats.options, self._row, None, *self._sums)

    def _pick(self) -> None:
        seats = self.seats
        outputs = seats.step, seats.drawn, seats.log_probs
        sampling.pick(self._logits, seats.state, seats.options, self._row, None, *self._sums, *outputs)

    def _begin_step(self) -> None:
        seats, ring, block_size = self.seats, len(self.seats.drawn), self.runner.block_size
        inputs = seats.tokens[:, :1], seats.positions[:, :1], seats.slots[:1], torch.zeros_like(seats.step)
        sampling.begin_step(seats.state, seats.tables, self._row, *inputs, ring=ring, block_size=block_size)

    def _for_each_shape(self, *plays: Callable[[LayerShape], None]) -> list[Callable[[], None]]:
        return [partial(play, shape) for shape, play in product(self._shapes, plays)]

    def _rotate(self, shape: LayerShape) -> None:
        q, k, table = (self._zeros(shape, count, shape.key_dim) for count in (self._num_heads, shape.num_heads, 1))
        rotary(q, k, table[0], table[0])

    def _write(self, shape: LayerShape) -> None:
        cache = self._zeros(shape, shape.num_heads * self.runner.block_size, shape.value_dim)
        slots = torch.zeros(1, dtype=torch.int64, device=self.seats.device)
        write_to_cache(self._zeros(shape, shape.num_heads, shape.value_dim), cache, slots, self.runner.block_size)

    def _ways_to_attend(self) -> list[Callable[[], None]]:
        attend = partial(self._attend, self.runner.addresses[0])
        return self._for_each_shape(*(partial(attend, splits) for splits in {1, min(2, self.max_splits)}))

    def _attend(self, addresses: Tensor, splits: int, shape: LayerShape) -> None:
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=self.seats.device)
        decode_attention(
            self._zeros(shape, self._num_heads, shape.key_dim),
            self._zeros(shape, shape.num_heads, shape.key_dim),
            self._zeros(shape, shape.num_heads, shape.value_dim),
            addresses,
            self.seats.tables,
            self._row,
            positions=nowhere + 1,
            slots=nowhere,
            scale=1.0,
            window=shape.sliding_window,
            block_size=self.runner.block_size,
            splits=splits,
        )

    def _zeros(self, shape: LayerShape, num_heads: int, dim: int) -> Tensor:
        return torch.zeros(1, num_heads, 1, dim, dtype=shape.dtype, device=self.seats.device)
