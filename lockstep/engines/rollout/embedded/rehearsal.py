"""The kernels of a decode step, launched once for the spare seat, so that Triton compiles them side by side.

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
from lockstep.kernels.paged_decode import decode_attention
from lockstep.models.paged_attention import LayerShape
from lockstep.utils.device import background


class Rehearsal:
    """Draws first, since the first token waits for them; then steps. The seats may be used when what was begun has ended.

    max_splits: most stretches of one row's cache.
    """

    def __init__(self, runner: ModelRunner, seats: Seats, max_splits: int) -> None:
        self.runner, self.seats, self.max_splits = runner, seats, max_splits
        self._row = torch.full((1,), seats.spare, dtype=torch.int32, device=seats.device)
        self._logits = torch.zeros(1, runner.model.config.get_text_config().vocab_size, device=seats.device)
        self._sums = sampling.scratch(self._logits)
        self._draws = self._begin(self._sum_stretches, self._pick)
        self._steps: list[Future[None]] | None = None

    def end_draws(self) -> None:
        wait(self._draws)
        if self._steps is None:
            self._steps = self._begin(self._begin_step, *self._ways_to_attend())

    def end(self) -> None:
        self.end_draws()
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

    def _ways_to_attend(self) -> list[Callable[[], None]]:
        num_heads = getattr(self.runner.model.config.get_text_config(), "num_attention_heads", None)
        if num_heads is None:
            return []
        addresses, shapes = self.runner.addresses[0], set(self.runner.layers().values())
        ways = product(shapes, {1, min(2, self.max_splits)})
        return [partial(self._attend, addresses, shape, num_heads, splits) for shape, splits in ways]

    def _attend(self, addresses: Tensor, shape: LayerShape, num_heads: int, splits: int) -> None:
        def zeros(count: int, dim: int) -> Tensor:
            return torch.zeros(1, count, 1, dim, dtype=shape.dtype, device=self.seats.device)

        nowhere = torch.full((1,), -1, dtype=torch.int64, device=self.seats.device)
        decode_attention(
            zeros(num_heads, shape.key_dim),
            zeros(shape.num_heads, shape.key_dim),
            zeros(shape.num_heads, shape.value_dim),
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
